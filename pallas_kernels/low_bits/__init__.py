"""Quantization of activations, keys and values to few bits: codecs, block floating point, bipolar integers."""
