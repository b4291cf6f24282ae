"""The cache of keys and values for decoding. The slot of a token depends only on its position.

A layer that sees every key has one slot per token. A layer with a window has a ring buffer: a token overwrites the one
that left the window, so memory is bounded by the window. In front of the ring the first `pinned` tokens may have slots
of their own. The rows of a batch may differ in length.

Dims: B batch, T query length, S slots, N heads, K kv heads, H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxstack.models.attention.base import AttentionSpec, CacheSlots
from jaxstack.parallel import shard
from pallas_kernels.paged_attention.api import paged_attention, reads_pages_in_place


class KeyCache(NamedTuple):
    """Keys and values of one layer; those of one head are contiguous, as the matmuls of decoding read them."""

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]


def empty_cache(heads: AttentionSpec, batch: int, slots: int, dtype: jax.typing.DTypeLike) -> KeyCache:
    """Return a cache of zeros with `slots` slots per row."""
    shape = (batch, heads.num_kv_heads, slots, heads.head_dim)
    return KeyCache(*(shard(jnp.zeros(shape, dtype), "batch", "act_kv_heads", None, "act_head_dim") for _ in range(2)))


def slot_positions(seen: Int[Array, " B"], slots: int, pinned: int = 0) -> Int[Array, "B S"]:
    """Return the position of the token in each slot after the first `seen` tokens; -1 for an empty slot."""
    pinned = _pinned(slots, pinned)
    newest, slot = seen[:, None] - 1, jnp.arange(slots, dtype=jnp.int32)[None]
    position = newest - jnp.mod(newest - slot, slots - pinned)
    position = jnp.where(slot < pinned, slot, position)
    return jnp.where((position <= newest) & (position >= jnp.minimum(slot, pinned)), position, -1)


def store(
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    seen: Int[Array, " B"],
    pinned: int = 0,
) -> KeyCache:
    """Return the cache after the first tokens of each row; row b has `seen[b]` tokens, and padding after them."""
    positions = slot_positions(seen, cache.key.shape[2], pinned)
    index = jnp.maximum(positions, 0)[:, :, None, None]

    def pick(old: jax.Array, new: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(new, index, axis=1, mode="clip")
        return jnp.moveaxis(found, 2, 1).astype(old.dtype)

    return KeyCache(pick(cache.key, k), pick(cache.value, v))


def put(
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    slots: CacheSlots,
    pinned: int = 0,
) -> KeyCache:
    """Return the cache with further tokens at the positions `slots.queries`; padding is not written."""
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
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    slots: CacheSlots,
    pinned: int = 0,
) -> tuple[KeyCache, KeyCache, Int[Array, "B S"]]:
    """Add further tokens to the cache.

    Returns:
      The new cache; the keys and values that the queries of these tokens may see; and their positions.
    """
    after, size = put(cache, k, v, slots, pinned), cache.key.shape[2]
    if k.shape[1] == 1:
        return after, after, slot_positions(slots.seen_after, size, pinned)
    # The later of several tokens may overwrite keys that the earlier ones still see.
    new = KeyCache(*(jnp.moveaxis(x, 2, 1).astype(old.dtype) for x, old in zip((k, v), cache, strict=True)))
    both = KeyCache(*(jnp.concatenate(pair, axis=2) for pair in zip(cache, new, strict=True)))
    return after, both, jnp.concatenate([slot_positions(slots.seen, size, pinned), slots.queries], axis=1)


def attend_to(
    q: Float[Array, "B T N H"], seen: KeyCache, visible: Bool[Array, "#B #T S"], heads: AttentionSpec
) -> Float[Array, "B T N H"]:
    """Return the attention of queries to the keys in `seen` that are visible to them.

    Decoding reads the whole cache once per token and is limited by memory bandwidth, so a plain einsum is as fast as a
    kernel where the cache is full.
    """
    batch, length, num_heads, width = q.shape
    q = q.reshape(batch, length, seen.key.shape[1], -1, width)
    scores = jnp.einsum("btkgh,bksh->bkgts", q, seen.key, preferred_element_type=jnp.float32) * heads.scale
    if heads.soft_cap:
        scores = jnp.tanh(scores / heads.soft_cap) * heads.soft_cap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(seen.value.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", weights, seen.value).reshape(batch, length, num_heads, width)


def attend_newest(
    q: Float[Array, "B 1 N H"],
    cache: KeyCache,
    lengths: Int[Array, " B"],
    heads: AttentionSpec,
    implementation: str | None = None,
) -> Float[Array, "B 1 N H"] | None:
    """Return the attention of the last of each row's `lengths` tokens to all of them, by a kernel that reads no more.

    Args:
      cache: keys and values without a ring.
      implementation: a backend of `paged_attention`; None: the kernel.

    Returns:
      None if no kernel supports the call.
    """
    _, key_heads, slots, width = cache.key.shape
    # A key head of a row is a sequence of one page; the table is a constant of the program.
    sequences = cache.key.shape[0] * key_heads
    if not isinstance(sequences, int):
        return None  # jax.export with any number of rows, for which there is no constant table
    k_pages, v_pages = (x.reshape(sequences, slots, 1, width) for x in cache)
    table = np.arange(sequences, dtype=np.int32)[:, None]
    call = (q.reshape(sequences, 1, -1, width), k_pages, v_pages, table, jnp.repeat(lengths, key_heads))
    if implementation is None and not reads_pages_in_place(*call):
        return None
    out = paged_attention(*call, scale=heads.scale, soft_cap=heads.soft_cap, implementation=implementation)
    return out.reshape(q.shape)


def _pinned(slots: int, pinned: int) -> int:
    """Return 0 if all tokens have a slot, for the first ones then need none of their own."""
    return pinned if pinned < slots else 0
