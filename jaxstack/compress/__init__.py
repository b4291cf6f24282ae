"""Compression of trained models: pruning, quantization, and the calibration that they need."""
