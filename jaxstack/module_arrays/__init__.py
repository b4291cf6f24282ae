"""Flax modules (NNX or Linen) as pure functions of nested dicts of arrays, and how these arrays are sharded."""
