"""Cuts a token stream into rows for the model: next-token labels, segment ids, positions within documents.

Dimensions: B rows, T sequence length.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

IGNORE = -100


class Stream(Protocol):
    """Interface of a stream of token ids, which are read by position."""

    tokens: int
    document_start: int

    @property
    def hashes(self) -> list[str]: ...

    def read(self, start: int, count: int) -> np.ndarray: ...

    def close(self) -> None: ...


def row_count(tokens: int, sequence_length: int) -> int:
    """Return how many rows of `sequence_length` tokens a token stream fills; the last may be padded."""
    return -(-(tokens - 1) // sequence_length) if tokens > 1 else 0


def read_row(stream: Stream, row: int, sequence_length: int, limit: int) -> np.ndarray:
    """Return a row's T+1 token ids (inputs and labels), int32; -1 after the stream's end or its first `limit` ids."""
    start = row * sequence_length
    ids = stream.read(start, min(sequence_length + 1, max(limit - start, 0)))
    if ids.size == sequence_length + 1:
        return ids.astype(np.int32)
    padded = np.full(sequence_length + 1, -1, np.int32)
    padded[: ids.size] = ids
    return padded


def make_batch(rows: Sequence[np.ndarray], document_start: int, packing: bool) -> dict[str, np.ndarray]:
    """Stack rows of T+1 token ids into a batch: tokens, next-token labels and, if `packing`, segment ids and positions.

    Args:
      rows: B arrays [T+1]; -1 marks padding at the end of a row.
      document_start: the id that opens a document and, as a label, ends the document before it.
      packing: add segment_ids and positions, which keep documents apart.

    Returns:
      tokens, labels [B, T] int32, where the label -100 is not trained on, and with packing
      segment_ids [B, T] int32, 1 for the first document of a row and 1 more at each later document start, and
      positions [B, T] int32, 0 at each document start and at each row's first token.
    """
    ids = np.stack(rows)
    padding = ids < 0
    ids = np.where(padding, np.int32(document_start), ids)
    tokens = np.ascontiguousarray(ids[:, :-1])
    labels = np.where(padding[:, 1:], np.int32(IGNORE), ids[:, 1:])
    batch = {"tokens": tokens, "labels": labels}
    if packing:
        batch["segment_ids"], batch["positions"] = segments(tokens, document_start)
    return batch


def segments(tokens: np.ndarray, document_start: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the segment ids and positions, each [B, T] int32, of rows of packed documents."""
    starts = tokens == document_start
    starts[:, 0] = True  # a row that continues a document opens its first segment
    segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
    columns = np.arange(tokens.shape[1], dtype=np.int32)
    positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return segment_ids, positions.astype(np.int32)


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack items into rows of length `capacity`: longest first, each into the fullest row that has room for it.

    Best-fit decreasing, which leaves almost no padding for language data (Ding et al. 2024, arXiv:2404.10830).

    Args:
      lengths: [E], each in 1..capacity.
      capacity: length of a row.

    Returns:
      The numbers of the items in each row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their remaining room
    rooms = 0  # bit r is set if with_room[r] has a row
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
