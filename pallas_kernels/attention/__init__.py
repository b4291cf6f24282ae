"""Exact softmax attention: `api.flash_attention` chooses among the backends of this folder."""
