"""Writing of new tokens to a KV cache: `api.rotate_into_cache` chooses among the backends of this folder."""
