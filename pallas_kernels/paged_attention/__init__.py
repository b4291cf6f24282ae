"""Attention of new tokens to keys and values in the pages of a cache: `api.paged_attention`."""
