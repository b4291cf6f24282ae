"""`rotate_into_cache` in XLA: a rotation of queries, and for keys and for values a scatter to the cache."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.request import CacheUpdateRequest
from pallas_kernels.low_bits.codecs import Fp8Codec
from pallas_kernels.pointwise.rotary import apply_rotary


def unsupported_reason(request: CacheUpdateRequest) -> str | None:
    """Return None, as this backend computes every call."""
    del request
    return None


def update(request: CacheUpdateRequest) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `rotate_into_cache` in XLA: queries [B, T, N, H], and the keys and values of the cache."""
    first = request.num_heads
    last = request.num_heads + request.key_heads
    q, k, v = jnp.split(request.joined, (first, last), axis=-2)
    q, k = (apply_rotary(x, request.cos, request.sin) for x in (q, k))

    def write_row(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        if request.slot_axis == 1:
            return old.at[slots].set(new, mode="drop")
        return old.at[:, slots].set(jnp.moveaxis(new, 0, 1), mode="drop")

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        stored = Fp8Codec().encode(new)[0] if request.fp8 else new.astype(old.dtype)
        return jax.vmap(write_row)(old, stored, request.slots)

    return q, write(request.keys, k), write(request.values, v)
