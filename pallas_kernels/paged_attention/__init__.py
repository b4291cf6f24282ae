"""Attention over a KV cache in pages: `api.paged_attention` chooses among the backends of this folder."""
