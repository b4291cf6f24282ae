"""Decoding of packed tokens with caches of fixed size, of which each running sequence has one: its slot.

Recurrent states, ring buffers of a window and sums of blocks cannot be cut into pages that sequences share. Such a
cache is one array with a row for each slot. The rows of a call's sequences are read, updated by the token mixer, and
written back.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxstack.models.layer import CacheSlots, LayerCache, pack_groups
from pallas_kernels.low_bits.encoded import Encoded, Stored, map_stored


class SlotRows(NamedTuple):
    """Rows of a call in a cache with one row for each slot."""

    slots: Int[Array, " R"]
    seen: Int[Array, " R"]
    """Tokens that each row has in the cache before this call."""
    filled: Bool[Array, " R"]
    """False for a row of padding."""

    def read(self, cache: LayerCache) -> LayerCache:
        """Return the rows of the slots, zeros (an empty cache) where a sequence has no earlier tokens."""

        def read(x: jax.Array) -> jax.Array:
            rows = x[self.slots]
            return jnp.where(self.seen.reshape(-1, *(1,) * (rows.ndim - 1)) > 0, rows, jnp.zeros_like(rows))

        return _map_arrays(read, cache)

    def write(self, cache: LayerCache, rows: LayerCache) -> LayerCache:
        """Return the cache with the rows of the slots replaced, except those of padding."""

        def write(x: jax.Array, rows: jax.Array) -> jax.Array:
            return x.at[self.written(len(x))].set(rows.astype(x.dtype), mode="drop")

        return _map_arrays(write, cache, rows)

    def written(self, slots: int) -> Int[Array, " R"]:
        """Return the slot of each row, `slots` (their number) for padding."""
        return jnp.where(self.filled, self.slots, slots)


def decode_slots(
    decode: Callable[..., tuple[Float[Array, "R C ..."], LayerCache]],
    packed: Sequence[Float[Array, "1 T ..."]],
    cache: LayerCache,
    slots: CacheSlots,
    step: Callable[..., tuple[Float[Array, "R 1 ..."], LayerCache]] | None = None,
) -> tuple[Float[Array, "1 T ..."], LayerCache]:
    """Add packed tokens of many sequences to their slots' caches; return the tokens' outputs, and the cache.

    A sequence has at most one row in a group. A row that starts at position 0 begins with an empty cache, whatever
    the slot's last sequence left. Tokens of a group of drafts change no cache.

    Args:
      decode: maps (*arrays of rows [R, C, ...], their caches, their `CacheSlots`) to their outputs and caches, as
        `AttentionKind.decode` does.
      packed: what each token brings, such as its query, key and value.
      cache: of a token mixer whose shared cache has one row for each slot.
      slots: positions of the tokens, and the sequences that they belong to.
      step: maps (*arrays of rows [R, 1, ...], the whole cache, their `SlotRows`) to their outputs and the cache, for
        rows of one token: it need not copy the rows of a large cache. None: `decode` computes them too.
    """
    assert slots.pages is not None
    outputs = []
    for group, (queries, *parts) in slots.pages.split(slots.queries, *packed):
        seen = group.lengths - (queries >= 0).sum(1)
        rows = SlotRows(group.slots, seen, group.lengths > 0)
        if step is not None and group.width == 1 and not group.drafts:
            out, cache = step(*parts, cache, rows)
        else:
            out, found = decode(*parts, rows.read(cache), CacheSlots(queries, seen))
            cache = cache if group.drafts else rows.write(cache, found)
        outputs.append(out)
    return pack_groups(outputs), cache


def padding_last(
    queries: Int[Array, "B T"], *arrays: Shaped[Array, "B T ..."]
) -> tuple[Int[Array, " B"], list[Shaped[Array, "B T ..."]], Callable[[jax.Array], jax.Array]]:
    """Move each row's padding behind its tokens, as recurrent mixers need it; the tokens of a row are contiguous.

    Args:
      queries: position of each token, -1 for padding, as `CacheSlots.queries`.
      arrays: one entry for each token.

    Returns:
      The number of tokens of each row, the arrays, and a function that moves an output back to the places of `queries`.
    """
    there = queries >= 0
    lengths = there.sum(1)
    if queries.shape[1] == 1:
        return lengths, list(arrays), lambda out: out
    first = jnp.argmax(there, axis=1)[:, None]
    places = jnp.arange(queries.shape[1])

    def move(x: jax.Array, by: jax.Array) -> jax.Array:
        index = (places + by) % places.size
        return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)

    return lengths, [move(x, first) for x in arrays], lambda out: move(out, -first)


def _map_arrays(function: Callable[..., jax.Array], *caches: LayerCache) -> LayerCache:
    """Apply `function` to the arrays of caches that have one row for each slot, which orders of channels have not."""

    def apply(*stored: Stored) -> Stored:
        return map_stored(function, *stored)

    return jax.tree.map(apply, *caches, is_leaf=lambda x: isinstance(x, Encoded))
