"""Which tiles of the score matrix a mask leaves anything of: schedules, known while tracing or cheap to compute.

A tile is a pair of a query block and a key block. It is whole where every query of it sees every key, cut where a
mask or the end of the keys goes through it, and skipped where nothing is visible.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.request import Mask, Segments


class Blocks(NamedTuple):
    """Real lengths (T, S) and block sizes."""

    length: int
    key_length: int
    query_block: int
    key_block: int


def _visibility(mask: Mask, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Boolean [query blocks, key blocks]: whether some pair of the tile is visible, whether every pair is."""
    length, key_length, query_block, key_block = blocks
    rows = np.arange(-(-length // query_block))[:, None]
    columns = np.arange(-(-key_length // key_block))[None, :]
    offset = key_length - length
    first_query = rows * query_block + offset
    last_query = np.minimum((rows + 1) * query_block, length) - 1 + offset
    first_key = columns * key_block
    last_key = np.minimum((columns + 1) * key_block, key_length) - 1
    some = np.ones((rows.size, columns.size), bool)
    every = np.broadcast_to((columns + 1) * key_block <= key_length, some.shape).copy()
    if mask.causal:
        some &= first_key <= last_query
        every &= last_key <= first_query
    if mask.window is not None:
        some &= last_key > first_query - mask.window
        every &= first_key > last_query - mask.window
    return some, every & some


def visible_pairs(
    mask: Mask, length: int, key_length: int, query_block: int, key_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The whole and the cut tiles, each int32 [tiles, 2] of (query block, key block), by query blocks."""
    some, every = _visibility(mask, Blocks(length, key_length, query_block, key_block))
    return np.argwhere(every).astype(np.int32), np.argwhere(some & ~every).astype(np.int32)


def key_ranges(mask: Mask, blocks: Blocks, segments: Segments | None) -> jax.Array:
    """For each query block, the key blocks to visit: int32 [B or 1, query blocks, 4].

    The four numbers are (first, first whole, end of the whole, end): blocks in [first whole, end of the whole) need
    no mask, the others of [first, end) do. With segments the range spans all blocks that share a segment number
    with the query block, which for documents in order is exactly those that are visible.
    """
    return _ranges(*_with_segments(mask, blocks, segments))


def query_ranges(mask: Mask, blocks: Blocks, segments: Segments | None) -> jax.Array:
    """For each key block, the query blocks to visit: int32 [B or 1, key blocks, 4], as in `key_ranges`."""
    some, every = _with_segments(mask, blocks, segments)
    return _ranges(some.swapaxes(-1, -2), every.swapaxes(-1, -2))


def _with_segments(mask: Mask, blocks: Blocks, segments: Segments | None) -> tuple[Any, Any]:
    some, every = (visible[None] for visible in _visibility(mask, blocks))
    if segments is None:
        return some, every
    low_query, high_query = _extremes(segments.query, blocks.query_block)
    low_key, high_key = _extremes(segments.key, blocks.key_block)
    low_query, high_query = low_query[:, :, None], high_query[:, :, None]
    low_key, high_key = low_key[:, None, :], high_key[:, None, :]
    share = (low_query <= high_key) & (low_key <= high_query)
    one = (low_query == high_query) & (low_key == high_key) & (low_query == low_key)
    return some & share, every & one


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest segment number of each block, [B, blocks]."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    return ids.min(axis=-1), ids.max(axis=-1)


def _ranges(some: Any, every: Any) -> jax.Array:
    """[B or 1, rows, columns] booleans -> int32 [B or 1, rows, 4]."""
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
    return jnp.asarray(xp.stack([first, first_whole, end_whole, end], axis=-1), jnp.int32)
