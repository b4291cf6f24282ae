"""Weights stored in few bits, and matmuls that read them as stored."""
