"""Turns text into batches of tokens: tokenizers, hash-verified token shards, packing, and seeded shuffling."""
