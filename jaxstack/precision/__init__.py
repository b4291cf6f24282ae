"""Dtypes of the computation, and FP8 recipes."""
