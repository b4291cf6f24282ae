"""Lists of the tiles of the score matrix that a mask leaves visible, so that kernels can skip the others.

A tile is a pair of a query block and a key block. It is whole if every query of it sees every key, cut if a mask or the
end of the keys goes through it, and skipped if nothing is visible.
"""

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.request import Segments
from pallas_kernels.mosaic_api import Index

_FAR = 2**62

Visible = np.ndarray | jax.Array
"""Booleans of tiles: known while tracing (numpy), or computed from segments (jax)."""
Bound = TypeVar("Bound", np.ndarray, Index)


class Blocks(NamedTuple):
    """Numbers of queries and keys before padding, and the sizes of the blocks that they are cut into."""

    length: int
    key_length: int
    query_block: int
    key_block: int


class Runs(NamedTuple):
    """Booleans of the three runs of tiles that a kernel visits one after the other: True if any block has such tiles.

    A kernel has no code for the other runs, and so compiles in less time. A cut tile is one that is visible in part.

    Attributes:
        before: Cut tiles before the whole ones.
        whole: Tiles that need no mask.
        after: Cut tiles after the whole ones.
    """

    before: bool
    whole: bool
    after: bool


def visible_block_pairs(
    mask: Mask, length: int, key_length: int, query_block: int, key_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """List the fully and the partly visible tiles, each as int32 [tiles, 2]: (query block, key block), in order."""
    some, every = _visibility(mask, Blocks(length, key_length, query_block, key_block))
    return np.argwhere(every).astype(np.int32), np.argwhere(some & ~every).astype(np.int32)


def key_ranges(mask: Mask, blocks: Blocks, segments: Segments | None, descending: bool = False) -> jax.Array:
    """Return the contiguous range of key blocks that each query block sees, for causal masks and sliding windows.

    The result is int32 [B or 1, query blocks, 4]. The four numbers are (first, first whole, end of the whole, end):
    blocks in [first whole, end of the whole) need no mask, the others of [first, end) do. With segments the range
    spans all blocks that share a segment number with the query block, which for documents in order is exactly those
    that are visible. Without a whole block, all cut ones are in the run that is visited first: that from first to first
    whole, or, if blocks are visited in `descending` order, that from the end of the whole to the end.
    """
    return jnp.asarray(_ranges(*visible_tiles(mask, blocks, segments), descending), jnp.int32)


def query_ranges(mask: Mask, blocks: Blocks, segments: Segments | None, descending: bool = False) -> jax.Array:
    """Return the contiguous range of query blocks that see each key block, for causal masks and sliding windows.

    The result is int32 [B or 1, key blocks, 4], whose four numbers are as in `key_ranges`.
    """
    some, every = visible_tiles(mask, blocks, segments)
    return jnp.asarray(_ranges(some.swapaxes(-1, -2), every.swapaxes(-1, -2), descending), jnp.int32)


def key_lists(mask: Mask, blocks: Blocks, segments: Segments | None = None) -> tuple[jax.Array, jax.Array]:
    """Return lists of the key blocks that each query block sees, for any mask: the blocks need not be contiguous.

    Returns:
        tiles: int32 [B or 1, query blocks, most], block numbers: the whole ones, then the cut ones, each in ascending
            order, then zeros.
        counts: int32 [B or 1, query blocks, 2], numbers of whole tiles and of all tiles.
    """
    some, every = visible_tiles(mask, blocks, segments)
    most = possible_tiles(mask, blocks, segments is not None).sum(axis=1).max()
    return _lists(some, every, int(most))


def query_lists(mask: Mask, blocks: Blocks, segments: Segments | None = None) -> tuple[jax.Array, jax.Array]:
    """Return lists of the query blocks that see each key block, for any mask: the blocks need not be contiguous.

    The result is int32 [B or 1, key blocks, ...], as in `key_lists`.
    """
    some, every = visible_tiles(mask, blocks, segments)
    most = possible_tiles(mask, blocks, segments is not None).sum(axis=0).max()
    return _lists(some.swapaxes(-1, -2), every.swapaxes(-1, -2), int(most))


def key_schedule(
    mask: Mask, blocks: Blocks, segments: Segments | None, descending: bool = False
) -> tuple[jax.Array, ...]:
    """Return the key blocks that each query block sees, as ranges if the mask makes them contiguous, else as lists.

    The result is (`key_ranges`,) or that of `key_lists`; the order of visits concerns ranges only.
    """
    return (key_ranges(mask, blocks, segments, descending),) if mask.is_band else key_lists(mask, blocks, segments)


def query_schedule(
    mask: Mask, blocks: Blocks, segments: Segments | None, descending: bool = False
) -> tuple[jax.Array, ...]:
    """Return the query blocks that see each key block, as ranges if the mask makes them contiguous, else as lists.

    The result is (`query_ranges`,) or that of `query_lists`; the order of visits concerns ranges only.
    """
    return (query_ranges(mask, blocks, segments, descending),) if mask.is_band else query_lists(mask, blocks, segments)


def visit_bounds(first: Bound, first_whole: Bound, end_whole: Bound, end: Bound, descending: bool) -> tuple[Bound, ...]:
    """Convert a range of `key_ranges` or `query_ranges` to the numbers of its visits, in ascending or descending order.

    Returns:
        The number of visits, the first one of a whole tile, and the end of those.
    """
    if descending:
        return end - first, end - end_whole, end - first_whole
    return end - first, first_whole - first, end_whole - first


def key_runs(mask: Mask, blocks: Blocks, segmented: bool, start: int = 0, descending: bool = False) -> Runs:
    """Return which runs of key blocks a kernel has to visit that computes query blocks by `key_schedule`.

    Args:
        mask: Mask of the attention.
        blocks: Lengths and block sizes.
        segmented: True if there are segments, which are not known while tracing: any tile may then be cut or skipped.
        start: Number of visits of each block that come before the runs.
        descending: True if contiguous blocks are visited from the last to the first; as in the schedule and the kernel.
    """
    return _runs(mask.is_band, segmented, _visibility(mask, blocks), start, descending)


def query_runs(mask: Mask, blocks: Blocks, segmented: bool, descending: bool = False) -> Runs:
    """Return which runs of query blocks a kernel has to visit that computes key blocks by `query_schedule`.

    `descending` must be that of the schedule and of the kernel's visits.
    """
    some, every = _visibility(mask, blocks)
    return _runs(mask.is_band, segmented, (some.T, every.T), 0, descending)


def _runs(
    contiguous: bool, segmented: bool, visible: tuple[np.ndarray, np.ndarray], start: int, descending: bool
) -> Runs:
    if segmented:
        return Runs(before=contiguous, whole=True, after=True)
    some, every = visible
    if contiguous:
        total, whole, end_whole = visit_bounds(*_ranges(some, every, descending).T, descending=descending)
    else:
        total = some.sum(axis=1)
        whole = np.zeros(len(some), int)
        end_whole = every.sum(axis=1)
    bounds = np.maximum([0 * total, whole, end_whole, total], np.minimum(total, start))
    return Runs(*map(bool, (np.diff(bounds, axis=0) > 0).any(axis=1)))


def possible_tiles(mask: Mask, blocks: Blocks, segmented: bool) -> np.ndarray:
    """Return which tiles the mask may leave visible, whatever the segment ids: bool [query blocks, key blocks]."""
    if segmented and mask.global_tokens:
        mask = dataclasses.replace(mask, window=None, window_after=None, global_tokens=0)
    return _visibility(mask, blocks)[0]


def visible_tiles(mask: Mask, blocks: Blocks, segments: Segments | None) -> tuple[Visible, Visible]:
    """Return which tiles are at least partly and which are fully visible, each bool [B or 1, query blocks, key blocks].

    Exact without segments (numpy). With them (jax) a tile may be called cut that is whole or hides everything.
    """
    if segments is None:
        some, every = _visibility(mask, blocks)
        return some[None], every[None]
    some, every = (visible[None] for visible in _visibility(dataclasses.replace(mask, global_tokens=0), blocks))
    marks = segments.global_tokens(mask)
    if marks is not None:
        query = _any(marks[0], blocks.query_block)
        key = _any(marks[1], blocks.key_block)
        some = some | (possible_tiles(mask, blocks, True) & (query[:, :, None] | key[:, None, :]))
    low_query, high_query = _extremes(segments.query, blocks.query_block)
    low_key, high_key = _extremes(segments.key, blocks.key_block)
    low_query = low_query[:, :, None]
    high_query = high_query[:, :, None]
    low_key = low_key[:, None, :]
    high_key = high_key[:, None, :]
    share = (low_query <= high_key) & (low_key <= high_query)
    one = (low_query == high_query) & (low_key == high_key) & (low_query == low_key)
    return some & share, every & one


@functools.lru_cache(maxsize=64)
def _visibility(mask: Mask, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return two boolean arrays [query blocks, key blocks]: tiles with a visible key, and fully visible tiles.

    Tiles are cut further at the borders of the layout's blocks into cells, on which the layout is constant and the
    other rules are inequalities.
    """
    length, key_length, query_block, key_block = blocks
    offset = key_length - length
    size = mask.layout.block_size if mask.layout is not None else None
    rows, row_tiles = _cells(length, query_block, size, offset)
    columns, column_tiles = _cells(key_length, key_block, size, 0)
    rows = rows + offset
    some, every = _cell_visibility(mask, rows[:, :, None], columns[:, None, :])
    if mask.layout is not None and size is not None:
        seen = mask.layout.pattern[np.ix_(rows[0] // size, columns[0] // size)]
        some = some & seen
        every = every & seen
    some = np.logical_or.reduceat(np.logical_or.reduceat(some, row_tiles, axis=0), column_tiles, axis=1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(every, row_tiles, axis=0), column_tiles, axis=1)
    ends = (np.arange(every.shape[1]) + 1) * key_block
    every &= ends <= key_length
    some.setflags(write=False)
    every.setflags(write=False)
    return some, every


def _cells(length: int, block: int, size: int | None, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a sequence into cells at the borders of tiles and pattern blocks; return cells and each tile's first cell.

    Returns:
        [2, cells], the first and the last index of each; [tiles], the first cell of each tile.
    """
    tiles = np.arange(0, length, block)
    edges = tiles
    if size is not None:
        edges = np.union1d(tiles, np.arange(-offset % size, length, size))
    return np.stack([edges, np.append(edges[1:], length) - 1]), np.searchsorted(edges, tiles)


def _cell_visibility(mask: Mask, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each cell, whether any and whether every query-key pair is visible, ignoring the block pattern.

    Args:
        mask: The rules.
        rows: First and last query position of each cell, [2, rows, 1].
        columns: First and last key position of each cell, [2, 1, columns].
    """

    def near(
        first_q: np.ndarray, last_q: np.ndarray, first_k: np.ndarray, last_k: np.ndarray, band: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        # The distances of a cell are all integers between its corners': one of them must lie within the limits.
        low = 0 if mask.causal else -_FAR
        high = _FAR
        if band:
            high = high if mask.window is None else mask.window - 1
            low = low if mask.window_after is None else max(low, 1 - mask.window_after)
        least = first_q - last_k
        most = last_q - first_k
        return (least <= high) & (most >= low), (least >= low) & (most <= high)

    (first_q, last_q), (first_k, last_k) = rows, columns
    some, every = near(first_q, last_q, first_k, last_k, True)
    count = mask.global_tokens
    if count:
        reach, within = near(first_q, last_q, first_k, last_k, False)
        from_global, _ = near(first_q, np.minimum(last_q, count - 1), first_k, last_k, False)
        to_global, _ = near(first_q, last_q, first_k, np.minimum(last_k, count - 1), False)
        some = some | (from_global & (first_q < count)) | (to_global & (first_k < count))
        some = some & reach
        _, rest = near(np.maximum(first_q, count), last_q, np.maximum(first_k, count), last_k, True)
        every = within & (rest | (last_q < count) | (last_k < count))
    return some, every


def _lists(some: Visible, every: Visible, most: int) -> tuple[jax.Array, jax.Array]:
    """Convert boolean tile visibility to lists of visible tiles [B or 1, rows, most] and counts [B or 1, rows, 2]."""
    xp = np if isinstance(some, np.ndarray) else jnp
    rank = xp.where(every, 0, xp.where(some, 1, 2))
    counts = xp.stack([every.sum(axis=-1), some.sum(axis=-1)], axis=-1)
    tiles = xp.argsort(rank, axis=-1, stable=True)[..., : max(most, 1)]
    tiles = xp.where(xp.arange(tiles.shape[-1]) < counts[..., 1:], tiles, 0)
    return jnp.asarray(tiles, jnp.int32), jnp.asarray(counts, jnp.int32)


def _any(marks: jax.Array, block: int) -> jax.Array:
    """Return which blocks of a sequence have a marked position: bool [B, T] to bool [B, blocks]."""
    marks = jnp.pad(marks, ((0, 0), (0, -marks.shape[1] % block)))
    return marks.reshape(marks.shape[0], -1, block).any(axis=-1)


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the smallest and the largest segment id in each block of a sequence, [B, blocks]."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    return ids.min(axis=-1), ids.max(axis=-1)


def _ranges(some: Visible, every: Visible, descending: bool = False) -> Visible:
    """Convert boolean tile visibility to ranges of visible tiles, [..., rows, 4], as in `key_ranges`."""
    xp = np if isinstance(some, np.ndarray) else jnp
    count = some.shape[-1]
    columns = xp.arange(count)
    first = xp.where(some, columns, count).min(axis=-1)
    end = xp.where(some, columns + 1, 0).max(axis=-1)
    end = xp.maximum(end, first * (end > 0))
    first = xp.minimum(first, end)
    first_whole = xp.minimum(xp.where(every, columns, count).min(axis=-1), end)
    broken = ~every & (columns >= first_whole[..., None])
    end_whole = xp.minimum(xp.where(broken, columns, count).min(axis=-1), end)
    end_whole = xp.maximum(end_whole, first_whole)
    if descending:
        no_whole = first_whole == end_whole
        first_whole, end_whole = (xp.where(no_whole, first, edge) for edge in (first_whole, end_whole))
    return xp.stack([first, first_whole, end_whole, end], axis=-1)
