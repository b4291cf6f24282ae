"""Formats of compressed weights: each file has one, and the methods that round to its nearest values."""
