"""Turns text into batches of tokens: tokenizers, verified token shards, packing, and an order set by a seed."""
