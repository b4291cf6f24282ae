"""Which pairs of a query block and a key block a mask leaves anything of: a schedule, known while tracing."""

import numpy as np

from pallas_kernels.attention.request import Mask


def visible_pairs(
    mask: Mask, length: int, key_length: int, query_block: int, key_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tiles to compute, int32 [pairs, 2] of (query block, key block), in the order of the query blocks.

    Returns:
        whole: tiles in which every query sees every key, so that no mask is needed.
        cut: tiles that the mask, or the end of the keys, cuts through. Tiles without a visible pair are in
            neither.
    """
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
    every &= some
    return np.argwhere(every).astype(np.int32), np.argwhere(some & ~every).astype(np.int32)
