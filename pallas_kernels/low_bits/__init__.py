"""Numerics of activations, keys and values in few bits: codecs, block floating point, bipolar integers."""
