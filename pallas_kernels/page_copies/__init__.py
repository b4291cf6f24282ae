"""Copies of sequences whose keys and values are in pages of a cache."""
