"""From text to token batches: sources, tokenizers, verified shards, packing, and an order that the seed decides."""
