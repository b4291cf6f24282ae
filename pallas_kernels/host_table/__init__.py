"""Rows of tables in host memory, gathered by the GPU."""
