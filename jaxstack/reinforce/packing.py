"""Packs the answers of a batch into few of its rows, so that microbatches without answers need not be computed.

The shapes stay those of one answer in each row, whatever the lengths are. Dimensions: B rows, T tokens of a row.
"""

from collections.abc import Mapping

import numpy as np

from jaxstack.data.token_rows import IGNORE, pack


def fill_order(rows: int, shards: int, microbatches: int) -> np.ndarray:
    """Return the rows of a batch in the order in which they are filled, [B]: microbatch by microbatch.

    Args:
      rows: B.
      shards: number of devices that the rows are split over.
      microbatches: number of microbatches into which the rows of each device are split.
    """
    return np.arange(rows).reshape(shards, microbatches, -1).swapaxes(0, 1).ravel()


def pack_answers(
    batch: Mapping[str, np.ndarray], lengths: np.ndarray, order: np.ndarray, microbatches: int
) -> dict[str, np.ndarray]:
    """Return a batch in which several answers share a row, by best fit.

    Args:
      batch: arrays [B, T, ...] with one answer in each row.
      lengths: number of tokens of each row, [B].
      order: the rows in the order in which they are filled.
      microbatches: number of microbatches of the batch.

    Returns:
      The arrays with the answers in other places; `segment_ids`, 1, 2, ... for the answers of a row, and one more for
      its padding; `positions` in the answer; and `computed` [B] int32, 0 for rows of microbatches without answers.
    """
    padding = {"labels": IGNORE, "experts": -1}
    packed = {name: np.full_like(array, padding.get(name, 0)) for name, array in batch.items()}
    count, length = batch["labels"].shape
    segments = np.ones((count, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    rows = pack(lengths, length)
    for row, members in zip(order.tolist(), rows, strict=False):
        at = 0
        for number, member in enumerate(members, 1):
            place = slice(at, at + int(lengths[member]))
            for name, array in batch.items():
                packed[name][row, place] = array[member, : lengths[member]]
            segments[row, place] = number
            positions[row, place] = np.arange(lengths[member])
            at = place.stop
        segments[row, at:] = len(members) + 1  # its own segment, so that padding attends only to padding
        positions[row, at:] = np.arange(length - at)
    together = count // microbatches
    computed = np.zeros(count, np.int32)
    computed[order[: -(-len(rows) // together) * together]] = 1
    return {**packed, "segment_ids": segments, "positions": positions, "computed": computed}
