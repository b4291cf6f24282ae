"""Text to token batches: sources, tokenizers, verified shards, packing, a global order that the seed alone
decides.
"""
