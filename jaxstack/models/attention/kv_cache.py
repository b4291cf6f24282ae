"""KV cache for decoding: one slot per token, or a ring buffer for a window; a token's position gives its slot.

A layer that sees every key has one slot per token. A layer with a window has a ring buffer: a token overwrites the one
that left the window, so memory is bounded by the window. In front of the ring the first `pinned` tokens may have their
own slots. The rows of a batch may differ in length.

Dims: B batch, T query length, S slots, N heads, K kv heads, H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.cache_formats import empty_keys_and_values
from jaxstack.models.layer import Angles, CacheSlots
from pallas_kernels.kv_cache_update.api import rotate_into_cache
from pallas_kernels.low_bits.encoded import (
    Stored,
    decode,
    encode_like,
    map_stored,
    permute_query_channels,
    with_numbers,
    without_order,
)
from pallas_kernels.paged_attention.api import paged_attention, reads_pages_in_place


class KeyCache(NamedTuple):
    """Cached keys and values of one layer, [B, K, S, H]: contiguous per head, as decoding's matmuls read them."""

    key: Stored
    value: Stored

    @property
    def slots(self) -> int:
        """Number of tokens that a row of the cache has room for, S."""
        return jax.tree.leaves(self.key)[0].shape[2]


def empty_cache(heads: AttentionSpec, batch: int, slots: int, dtype: jax.typing.DTypeLike) -> KeyCache:
    """Create a layer's KV cache, filled with zeros, with room for `slots` tokens per row."""
    shape = (batch, heads.num_kv_heads, slots, heads.head_dim)
    return KeyCache(
        *empty_keys_and_values(heads.cache_format, shape, ("batch", "act_kv_heads", None, "act_head_dim"), dtype)
    )


def slot_positions(seen: Int[Array, " B"], slots: int, pinned: int = 0) -> Int[Array, "B S"]:
    """Return the position of the token in each slot, once a row has `seen` tokens; -1 for an empty slot."""
    pinned = _pinned(slots, pinned)
    newest = seen[:, None] - 1
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    position = newest - jnp.mod(newest - slot, slots - pinned)
    position = jnp.where(slot < pinned, slot, position)
    return jnp.where((position <= newest) & (position >= jnp.minimum(slot, pinned)), position, -1)


def store(
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    seen: Int[Array, " B"],
    pinned: int = 0,
) -> KeyCache:
    """Fill an empty cache with the prompts' keys and values; row b has `seen[b]` tokens, then padding."""
    positions = slot_positions(seen, cache.slots, pinned)
    index = jnp.maximum(positions, 0)[:, :, None, None]

    def pick(new: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.take_along_axis(new, index, axis=1, mode="clip"), 2, 1)

    return KeyCache(map_stored(pick, encode_like(cache.key, k)), map_stored(pick, encode_like(cache.value, v)))


def put(
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    slots: CacheSlots,
    pinned: int = 0,
) -> KeyCache:
    """Write further tokens to the cache at the positions `slots.queries`, skipping padding; return the cache."""
    slot = _slots_of(slots, cache.slots, pinned)

    def row(old: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        return old.at[:, slot].set(jnp.moveaxis(new, 0, 1), mode="drop")

    def write(old: Stored, new: jax.Array) -> Stored:
        return map_stored(lambda old, new: jax.vmap(row)(old, new, slot), old, encode_like(old, new))

    return KeyCache(write(cache.key, k), write(cache.value, v))


def put_joined(
    cache: KeyCache,
    joined: Float[Array, "B T heads H"],
    angles: Angles,
    slots: CacheSlots,
    heads: AttentionSpec,
    pinned: int = 0,
) -> tuple[Float[Array, "B T N H"], KeyCache]:
    """Rotate further tokens' queries and keys, and write keys and values to the cache as `put` does.

    See `AttentionKind.decode_joined` for the arguments.

    Returns:
      The rotated queries, and the cache.
    """
    (key,), (value,) = (jax.tree.leaves(x) for x in cache)
    cos, sin = (x.squeeze(-2) for x in angles)
    slot = _slots_of(slots, cache.slots, pinned)
    q, key, value = rotate_into_cache(joined, cos, sin, key, value, slot, num_heads=heads.num_heads, slot_axis=2)
    return q, KeyCache(with_numbers(cache.key, key), with_numbers(cache.value, value))


def extend(
    cache: KeyCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    slots: CacheSlots,
    pinned: int = 0,
) -> tuple[KeyCache, KeyCache, Int[Array, "B S"]]:
    """Return the cache with new tokens added, the keys and values that their queries may see, and key positions.

    Returns:
      The new cache; the keys and values that the queries of these tokens may see; and their positions.
    """
    after = put(cache, k, v, slots, pinned)
    size = cache.slots
    if k.shape[1] == 1:
        return after, after, slot_positions(slots.lengths_after, size, pinned)

    # The later of several tokens may overwrite keys that the earlier ones still see.
    def append(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([old, jnp.moveaxis(new, 2, 1)], axis=2)

    both = KeyCache(*(map_stored(append, old, encode_like(old, x)) for old, x in zip(cache, (k, v), strict=True)))
    return after, both, jnp.concatenate([slot_positions(slots.seen, size, pinned), slots.queries], axis=1)


def attend_to(
    q: Float[Array, "B T N H"],
    seen: KeyCache,
    visible: Bool[Array, "#B #T S"],
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N V"]:
    """Compute attention of queries to the cached keys and values that the mask `visible` allows.

    Decoding reads the whole cache once per token and is limited by memory bandwidth, so a plain einsum is as fast as a
    kernel where the cache is full.

    Args:
      sinks: one more score of each query of a head, whose value is 0; None: there are none.
    """
    batch, length, num_heads, width = q.shape
    k = decode(seen.key, q.dtype)
    v = decode(seen.value, q.dtype)
    q = permute_query_channels(q, seen.key).reshape(batch, length, k.shape[1], -1, width)
    scores = jnp.einsum("btkgh,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * heads.scale
    if heads.soft_cap:
        scores = jnp.tanh(scores / heads.soft_cap) * heads.soft_cap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(scores.shape[1:3])[..., None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]].astype(v.dtype)
    return jnp.einsum("bkgts,bksh->btkgh", weights, v).reshape(batch, length, num_heads, v.shape[-1])


def attend_newest(
    q: Float[Array, "B 1 N H"],
    cache: KeyCache,
    lengths: Int[Array, " B"],
    heads: AttentionSpec,
    implementation: str | None = None,
) -> Float[Array, "B 1 N H"] | None:
    """Compute attention of each row's newest token to its cached tokens, by a kernel that reads no empty slots.

    Args:
      cache: keys and values without a ring.
      implementation: a backend of `paged_attention`; None: the kernel.

    Returns:
      None if no kernel supports the call.
    """
    batch, key_heads, slots, _ = jax.tree.leaves(cache.key)[0].shape
    # A key head of a row is a sequence of one page; the table is a constant of the program.
    sequences = batch * key_heads
    if not isinstance(sequences, int):
        return None  # jax.export with any number of rows, for which there is no constant table

    def as_pages(x: jax.Array) -> jax.Array:
        return x.reshape(sequences, slots, 1, x.shape[-1])

    k_pages = map_stored(as_pages, without_order(cache.key))
    v_pages = map_stored(as_pages, cache.value)
    table = np.arange(sequences, dtype=np.int32)[:, None]
    rows = permute_query_channels(q, cache.key).reshape(sequences, 1, -1, q.shape[-1])
    call = (rows, k_pages, v_pages, table, jnp.repeat(lengths, key_heads))
    if implementation is None and not reads_pages_in_place(*call):
        return None
    out = paged_attention(*call, scale=heads.scale, soft_cap=heads.soft_cap, implementation=implementation)
    return out.reshape(q.shape)


def _slots_of(slots: CacheSlots, size: int, pinned: int) -> Int[Array, "B T"]:
    """Return the slot of each new token in a cache of `size` slots per row; `size` for a token that is not stored."""
    positions = slots.queries
    pinned = _pinned(size, pinned)
    ring = pinned + jnp.mod(positions - pinned, size - pinned)
    kept = (positions >= slots.lengths_after[:, None] - (size - pinned)) | (positions < pinned)
    slot = jnp.where(positions < pinned, positions, ring)
    return jnp.where(kept & (positions >= 0), slot, size)


def _pinned(slots: int, pinned: int) -> int:
    """Return how many slots are reserved for the first tokens; 0 if the cache has a slot for every token."""
    return pinned if pinned < slots else 0
