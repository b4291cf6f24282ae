"""Keys and values of the tokens before, for decoding: slots that depend on a token's position alone.

A layer that sees every key has a slot a token. One with a window keeps a ring: a token takes the slot of the one that
left the window, so that memory is bounded by the window. In front of the ring the first `pinned` tokens may have slots
of their own. Rows of a batch need not be equally long.

Dims: B batch, T query length, S slots, N heads, K kv heads, H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.attention.base import AttentionSpec, CacheSlots
from jaxstack.parallel import shard


class KeyCache(NamedTuple):
    """Of one layer, [B, K, S, H] each: a head's keys are neighbours, as the matmuls of decoding read them."""

    key: jax.Array
    value: jax.Array


def empty_cache(heads: AttentionSpec, batch: int, slots: int, dtype: jax.typing.DTypeLike) -> KeyCache:
    """Nothing seen yet."""
    shape = (batch, heads.num_kv_heads, slots, heads.head_dim)
    return KeyCache(*(shard(jnp.zeros(shape, dtype), "batch", "act_kv_heads", None, "act_head_dim") for _ in range(2)))


def held_positions(seen: jax.Array, slots: int, pinned: int = 0) -> jax.Array:
    """[B, S] int32: the position of the token in each slot after the first `seen` [B] tokens; -1: none."""
    pinned = _pinned(slots, pinned)
    newest, slot = seen[:, None] - 1, jnp.arange(slots, dtype=jnp.int32)[None]
    held = newest - jnp.mod(newest - slot, slots - pinned)
    held = jnp.where(slot < pinned, slot, held)
    return jnp.where((held <= newest) & (held >= jnp.minimum(slot, pinned)), held, -1)


def store(cache: KeyCache, k: jax.Array, v: jax.Array, seen: jax.Array, pinned: int = 0) -> KeyCache:
    """The cache after the first tokens k, v [B, T, K, H] of each row, of which the row `seen` [B] are there."""
    held = held_positions(seen, cache.key.shape[2], pinned)
    index = jnp.maximum(held, 0)[:, :, None, None]

    def pick(old: jax.Array, new: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(new, index, axis=1, mode="clip")
        return jnp.moveaxis(found, 2, 1).astype(old.dtype)

    return KeyCache(pick(cache.key, k), pick(cache.value, v))


def put(cache: KeyCache, k: jax.Array, v: jax.Array, slots: CacheSlots, pinned: int = 0) -> KeyCache:
    """The cache with further tokens k, v [B, T, K, H] at the positions `slots.queries`; padding is not written."""
    size, positions = cache.key.shape[2], slots.queries
    pinned = _pinned(size, pinned)
    ring = pinned + jnp.mod(positions - pinned, size - pinned)
    kept = (positions >= slots.seen_after[:, None] - (size - pinned)) | (positions < pinned)
    slot = jnp.where(positions < pinned, positions, ring)
    slot = jnp.where(kept & (positions >= 0), slot, size)

    def row(old: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        return old.at[:, slot].set(jnp.moveaxis(new, 0, 1).astype(old.dtype), mode="drop")

    return KeyCache(jax.vmap(row)(cache.key, k, slot), jax.vmap(row)(cache.value, v, slot))


def extend(
    cache: KeyCache, k: jax.Array, v: jax.Array, slots: CacheSlots, pinned: int = 0
) -> tuple[KeyCache, KeyCache, jax.Array]:
    """The cache with further tokens; and what their queries may see: keys and values, and their positions [B, S]."""
    after, size = put(cache, k, v, slots, pinned), cache.key.shape[2]
    if k.shape[1] == 1:
        return after, after, held_positions(slots.seen_after, size, pinned)
    # Later ones of several tokens may take the slots of keys that earlier ones still see.
    new = KeyCache(*(jnp.moveaxis(x, 2, 1).astype(old.dtype) for x, old in zip((k, v), cache, strict=True)))
    both = KeyCache(*(jnp.concatenate(pair, axis=2) for pair in zip(cache, new, strict=True)))
    return after, both, jnp.concatenate([held_positions(slots.seen, size, pinned), slots.queries], axis=1)


def attend_to(q: jax.Array, seen: KeyCache, visible: jax.Array, heads: AttentionSpec) -> jax.Array:
    """q [B, T, N, H] to keys and values [B, K, S, H] as far as `visible` [B, T, S]: [B, T, N, H].

    Decoding reads the whole cache once a token: bound by its bytes, so a plain einsum is as fast as a kernel.
    """
    batch, length, num_heads, width = q.shape
    q = q.reshape(batch, length, seen.key.shape[1], -1, width)
    scores = jnp.einsum("btkgh,bksh->bkgts", q, seen.key, preferred_element_type=jnp.float32) * heads.scale
    if heads.soft_cap:
        scores = jnp.tanh(scores / heads.soft_cap) * heads.soft_cap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(seen.value.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", weights, seen.value).reshape(batch, length, num_heads, width)


def _pinned(slots: int, pinned: int) -> int:
    """Where all tokens have a slot, the first ones need none of their own."""
    return pinned if pinned < slots else 0
