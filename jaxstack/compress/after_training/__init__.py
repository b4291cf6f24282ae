"""Compression of trained models: calibration, one layer after the other, and the report of sizes and losses."""
