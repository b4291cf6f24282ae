"""Dtype policy."""
