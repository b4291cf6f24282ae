"""Numeric precision: dtypes of the computation, and FP8 matmuls with their scaling recipes."""
