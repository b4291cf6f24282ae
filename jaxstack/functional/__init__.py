"""Flax modules, NNX or Linen, as pure functions of nested dicts of arrays, and where these arrays are stored."""
