"""Paged KV cache shared by many sequences, and attention of new tokens (packed in one row) to the cached keys.

The tokens of one step, of any number of sequences, are packed in one row [1, T] without padding between them (as in
EnergonAI, Du et al. 2022, arXiv:2209.02341).
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.cache_formats import empty_keys_and_values
from jaxstack.models.layer import Angles, CacheRoom, PageGroup, PageSlots, pack_groups
from jaxstack.parallel import current_rules, with_local_heads
from jaxstack.parallel.rules import AxisRules
from pallas_kernels import flash_attention
from pallas_kernels.attention.hidden_tiles import skips_hidden_tiles
from pallas_kernels.batch_invariant import attention as invariant
from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.kv_cache_update.api import rotate_into_cache
from pallas_kernels.low_bits.encoded import (
    Stored,
    decode,
    encode_like,
    map_stored,
    permute_query_channels,
    with_numbers,
)
from pallas_kernels.page_copies.api import copies_by_kernel, copy_newest
from pallas_kernels.page_copies.xla import places_of
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.target import current_target

_FEW = 16
"""Most new tokens per sequence for which attention reads the pages where they are. On a CPU it always does, because
there the kernels for whole arrays would compute all of a page table's width."""


_LEAST_COPIED = 1024
"""Fewest keys per sequence that a chunk of a prompt copies, if the page table has room for as many."""


class PagedKeys(NamedTuple):
    """Cached keys and values of one layer in P pages, [P, page, K, H]."""

    key: Stored
    value: Stored


def empty_pages(heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> PagedKeys:
    """Create a layer's paged KV cache, filled with zeros: `room.pages` pages of `room.page_size` tokens."""
    shape = (room.pages, room.page_size, heads.num_kv_heads, heads.head_dim)
    return PagedKeys(
        *empty_keys_and_values(heads.cache_format, shape, (None, None, "act_kv_heads", "act_head_dim"), dtype)
    )


def put_in_pages(
    cache: PagedKeys, k: Float[Array, "1 T K H"], v: Float[Array, "1 T K V"], slots: PageSlots
) -> PagedKeys:
    """Write packed tokens' keys and values to their pages, skipping padding; return the cache."""
    return PagedKeys(_write(cache.key, k, slots.write), _write(cache.value, v, slots.write))


def put_joined_in_pages(
    cache: PagedKeys, joined: Float[Array, "1 T heads H"], angles: Angles, slots: PageSlots, heads: AttentionSpec
) -> tuple[Float[Array, "1 T N H"], PagedKeys]:
    """Rotate packed tokens' queries and keys, and write keys and values to their pages, skipping padding.

    See `AttentionKind.decode_joined` for the arguments.

    Returns:
      The rotated queries, and the cache.
    """
    (key,), (value,) = (jax.tree.leaves(x) for x in cache)
    cos, sin = (x.squeeze(-2) for x in angles)
    # All pages are one row of slots, as the tokens are one row.
    key_row, value_row = (x.reshape(1, -1, *x.shape[2:]) for x in (key, value))
    q, key_row, value_row = rotate_into_cache(
        joined, cos, sin, key_row, value_row, slots.write[None], num_heads=heads.num_heads, slot_axis=1
    )
    return q, PagedKeys(with_numbers(cache.key, key_row), with_numbers(cache.value, value_row))


def attend_pages(
    q: Float[Array, "1 T N H"],
    cache: PagedKeys,
    slots: PageSlots,
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "1 T N V"], PagedKeys]:
    """Return the attention of packed tokens, whose keys and values are in the cache, and the cache.

    `sinks` are scores of each head without a value, None if there are none.
    """
    outputs = []
    for group, (part,) in slots.split(q):
        if is_batch_invariant():
            outputs.append(_attend_invariantly(part, cache, group, heads))
            continue
        if heads.chunk is not None:
            outputs.append(_attend_chunk(part, cache, group, heads, sinks))
            continue
        in_place = group.width <= _FEW or current_target().platform == "cpu"
        # Values that are channels of their keys are never copied: no other kernel takes keys as wide as latents.
        in_place = in_place or heads.value_width is not None
        attend = _attend_in_place if in_place else _attend_chunks
        outputs.append(attend(part, cache, group, heads, sinks))
    # The barrier orders these reads before the next write to the pages in the same program. Without it XLA copies all
    # pages to be safe.
    return jax.lax.optimization_barrier((pack_groups(outputs), cache))


def _attend_invariantly(
    q: Float[Array, "R T N H"], cache: PagedKeys, group: PageGroup, heads: AttentionSpec
) -> Float[Array, "R T N H"]:
    """Compute attention as `SoftmaxAttention.attend` does in the context `batch_invariant`, with the same bits."""
    key, value = (cast(jax.Array, x) for x in cache)
    return invariant.attend_pages(q, key, value, group.table, group.lengths, **heads.score_options)


def _attend_chunk(
    q: Float[Array, "R T N H"],
    cache: PagedKeys,
    group: PageGroup,
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "R T N H"]:
    """Compute attention of each query to its own chunk of positions; pages before the first query's are not read."""
    assert heads.chunk is not None
    size = jax.tree.leaves(cache.key)[0].shape[1]
    width = min(group.table.shape[1], -(-(heads.chunk + group.width) // size) + 1)
    first = jnp.maximum(group.lengths - group.width, 0) // heads.chunk * heads.chunk // size
    index = jnp.minimum(first[:, None] + jnp.arange(width, dtype=jnp.int32), group.table.shape[1] - 1)
    table = jnp.take_along_axis(group.table, index, axis=1)
    lengths = group.lengths - first * size
    if group.width == 1 and heads.chunk % size == 0:
        whole = dataclasses.replace(heads, chunk=None)
        return _attend_in_place(q, cache, group._replace(table=table, lengths=lengths), whole, sinks)
    return _attend_copies(q, cache, table, lengths, sinks, first * size, width=width, heads=heads)


def _attend_in_place(
    q: Float[Array, "R T N H"],
    cache: PagedKeys,
    group: PageGroup,
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "R T N V"]:
    """Compute attention that reads pages in place, by the page table, without copying them; for few new tokens."""

    def attend(
        q: jax.Array,
        key: Stored,
        value: Stored,
        table: jax.Array,
        lengths: jax.Array,
        sinks: jax.Array | None,
        implementation: str | None = None,
    ) -> jax.Array:
        return paged_attention(
            q,
            key,
            heads.value_width or value,
            table,
            lengths,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            window=heads.window,
            sinks=sinks,
            implementation=implementation,
        )

    arguments = cache.key, cache.value, group.table, group.lengths
    rules = current_rules()
    if rules is None or rules.mesh.size == 1:
        return attend(q, *arguments, sinks)
    key, value, *places = arguments
    (keys, *more_keys), key_tree = jax.tree.flatten(key)
    (values, *more_values), value_tree = jax.tree.flatten(value)
    if not more_keys and not more_values and _splits_by_heads(rules, q, keys):  # each is one array, of any format

        def attend_locally(q: jax.Array, keys: jax.Array, values: jax.Array, *others: Any) -> jax.Array:
            return attend(q, key_tree.unflatten([keys]), value_tree.unflatten([values]), *others)

        return with_local_heads(attend_locally, q, keys, values, whole=tuple(places), per_head=(sinks,))
    # XLA cannot partition a kernel over the devices of a mesh.
    return attend(q, *arguments, sinks, implementation="xla")


def _splits_by_heads(rules: AxisRules, q: jax.Array, pages: jax.Array) -> bool:
    """Return True if each device holds the pages for its own query heads, and the batch is not sharded.

    One key head is on every device.
    """
    heads, kv_heads = (rules.spec((axis,), (x.shape[2],))[0] for axis, x in (("act_heads", q), ("act_kv_heads", pages)))
    return (heads == kv_heads or pages.shape[2] == 1) and rules.degree(rules.table["batch"]) == 1


def _attend_chunks(
    q: Float[Array, "R T N H"],
    cache: PagedKeys,
    group: PageGroup,
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "R T N H"]:
    """Compute attention of chunks of prompts, copying each sequence's pages to one contiguous array first.

    Where kernels copy the tokens that there are, and read no others, the array is as wide as the page table. Otherwise
    it has one of a few sizes: the cost depends on the longest sequence and not on the table's width. The host then
    reads the size from the device in every layer, which waits for it meanwhile.
    """
    if _kernels_copy(q, cache, group, heads):
        return _attend_kernel_copies(q, cache, group, heads, sinks)
    size = jax.tree.leaves(cache.key)[0].shape[1]
    widths = copied_widths(group.table.shape[1], max(1, _LEAST_COPIED // size))
    too_narrow = [group.lengths.max() > width * size for width in widths[:-1]]
    branches = [partial(_attend_copies, width=width, heads=heads) for width in widths]
    arguments = q, cache, group.table, group.lengths, sinks
    if not too_narrow:
        return branches[0](*arguments)
    return jax.lax.switch(jnp.stack(too_narrow).sum(dtype=jnp.int32), branches, *arguments)


def _kernels_copy(q: Float[Array, "R T N H"], cache: PagedKeys, group: PageGroup, heads: AttentionSpec) -> bool:
    """Return True if kernels copy the tokens of the sequences, and attend to these only, on each device's own heads."""
    leaves = jax.tree.leaves(tuple(cache))
    rules = current_rules()
    if len(leaves) > 2 or not (rules is None or rules.mesh.size == 1 or _splits_by_heads(rules, q, leaves[0])):
        return False
    found = list[bool]()

    def ask(q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        if found_kernel := copies_by_kernel(keys, values, table, lengths, dtype=q.dtype):
            slots = table.shape[1] * keys.shape[1]
            k, v = (jnp.zeros((len(table), slots, *x.shape[2:]), q.dtype) for x in (keys, values))
            segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
            found_kernel = skips_hidden_tiles(
                q, k, v, segments, window=heads.window, implementation=heads.implementation
            )
        found.append(found_kernel)
        return q

    jax.eval_shape(
        lambda q, keys, values, *places: with_local_heads(ask, q, keys, values, whole=places),
        q, *leaves, group.table, group.lengths,
    )  # fmt: skip
    return found[-1]


def _attend_kernel_copies(
    q: Float[Array, "R T N H"],
    cache: PagedKeys,
    group: PageGroup,
    heads: AttentionSpec,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "R T N H"]:
    """Compute attention of chunks of prompts to what `copy_newest` copies of each sequence."""

    def attend(
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        table: jax.Array,
        lengths: jax.Array,
        sinks: jax.Array | None,
    ) -> jax.Array:
        k, v = copy_newest(keys, values, table, lengths, dtype=q.dtype)
        slots = jnp.arange(k.shape[1], dtype=jnp.int32)
        segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.where(slots >= k.shape[1] - lengths[:, None], 0, -1)
        out = flash_attention(
            q, k, v, segment_ids=segments, sinks=sinks, implementation=heads.implementation, **heads.score_options
        )
        return cast(jax.Array, out)

    keys, values = jax.tree.leaves(tuple(cache))
    return with_local_heads(attend, q, keys, values, whole=(group.table, group.lengths), per_head=(sinks,))


def copied_widths(pages: int, least: int) -> tuple[int, ...]:
    """Return the sizes, in pages, that a contiguous copy of a sequence may have: `pages` / 4^i, at least `least`."""
    widths = [pages]
    while widths[0] > least:
        widths.insert(0, max(least, -(-widths[0] // 4)))
    return tuple(widths)


def _attend_copies(
    q: Float[Array, "R T N H"],
    cache: PagedKeys,
    table: Int[Array, "R pages"],
    lengths: Int[Array, " R"],
    sinks: Float[Array, " N"] | None,
    start: Int[Array, " R"] | None = None,
    *,
    width: int,
    heads: AttentionSpec,
) -> Float[Array, "R T N H"]:
    """Compute attention of chunks of prompts to contiguous copies of each sequence's first `width` pages.

    With `heads.chunk` a sequence's first page starts at the position `start`.
    """
    size = jax.tree.leaves(cache.key)[0].shape[1]
    index, positions = places_of(table[:, :width], lengths, size)
    k, v = (decode(map_stored(lambda x: x.reshape(-1, *x.shape[2:])[index], stored), q.dtype) for stored in cache)
    key_segments = jnp.where(positions >= 0, 0, -1)
    own_segments = jnp.zeros(q.shape[:2], jnp.int32)
    if heads.chunk is not None and start is not None:
        key_segments = jnp.where(positions >= 0, (start[:, None] + positions) // heads.chunk, -1)
        newest = start + lengths
        own_segments = (newest[:, None] - jnp.arange(q.shape[1], 0, -1, dtype=jnp.int32)) // heads.chunk

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array, other: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        out = flash_attention(
            q,
            k,
            v,
            window=heads.window,
            segment_ids=(own, other),
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            sinks=sinks,
            implementation=heads.implementation,
        )
        return cast(jax.Array, out)

    return with_local_heads(
        attend,
        permute_query_channels(q, cache.key),
        k,
        v,
        own_segments,
        key_segments,
        per_head=(sinks,),
    )


def copy_pages(cache: PagedKeys, table: Int[Array, "R pages"]) -> tuple[Stored, Stored]:
    """Copy the pages of each sequence to one contiguous array of keys and one of values, [R, K, pages * page, H]."""

    def copy(pages: jax.Array) -> jax.Array:
        rows, width = table.shape
        return jnp.moveaxis(pages[table].reshape(rows, width * pages.shape[1], *pages.shape[2:]), 2, 1)

    return map_stored(copy, cache.key), map_stored(copy, cache.value)


def _write(pages: Stored, new: jax.Array, write: Int[Array, " T"]) -> Stored:
    def put(pages: jax.Array, new: jax.Array) -> jax.Array:
        flat = pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])
        return flat.at[write].set(new[0], mode="drop").reshape(pages.shape)

    return map_stored(put, pages, encode_like(pages, new))
