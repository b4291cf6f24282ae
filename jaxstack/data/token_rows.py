"""Rows of T tokens as a model's inputs: of a stream of text, or of examples put together.

Dimensions: T sequence length.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxstack.data.packing import IGNORE, Stream, make_batch, pack, read_row, row_count

Row = dict[str, np.ndarray]


@runtime_checkable
class ExampleSet(Protocol):
    """Examples end to end; see `jaxstack.data.chat.Examples`."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def answers(self) -> np.ndarray: ...

    @property
    def ends(self) -> np.ndarray: ...

    @property
    def tokens(self) -> int: ...

    @property
    def hashes(self) -> list[str]: ...

    def close(self) -> None: ...


class Rows(Protocol):
    """A source's rows, by number."""

    count: int
    labels: int
    """Ids that are predicted, in all rows."""

    def read(self, row: int, limit: int | None = None) -> Row:
        """A row's arrays [T] int32; ids behind the first `limit` labels of all rows are not predicted."""
        ...

    def count_for(self, limit: int) -> int:
        """How many rows hold the first `limit` labels."""
        ...

    def label_ids(self, limit: int) -> np.ndarray:
        """The first `limit` labels."""
        ...


class TextRows:
    """Rows of a stream: each but the last of T labels, whatever documents begin and end in it."""

    def __init__(self, stream: Stream, sequence_length: int, packing: bool):
        self._stream, self._length, self._packing = stream, sequence_length, packing
        self.count, self.labels = row_count(stream.tokens, sequence_length), max(stream.tokens - 1, 0)

    def read(self, row: int, limit: int | None = None) -> Row:
        places = self._stream.tokens if limit is None else limit + 1 if limit else 0
        ids = read_row(self._stream, row, self._length, places)
        return {name: x[0] for name, x in make_batch([ids], self._stream.document_start, self._packing).items()}

    def count_for(self, limit: int) -> int:
        return row_count(limit + 1, self._length)

    def label_ids(self, limit: int) -> np.ndarray:
        return self._stream.read(1, limit)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What became of examples whose tokens are more than a row has."""

    total: int
    too_long: int
    """Examples of more than T tokens."""
    longest: int
    """Tokens of the longest."""
    left_out: int
    """Examples of which nothing is learnt, or that were dropped."""


class ExampleRows:
    """Rows of whole examples, the longest first into the fullest row that has room for it; in an order of their own.

    Args:
      truncate: cut examples that are longer than a row; False leaves them out.
      packing: False: one example a row.
    """

    def __init__(self, examples: ExampleSet, sequence_length: int, *, truncate: bool, packing: bool):
        self._examples, self._length = examples, sequence_length
        begins = np.concatenate([[0], examples.ends[:-1]]).astype(np.int64)[: len(examples.ends)]
        lengths = examples.ends - begins
        kept = np.minimum(lengths, sequence_length + 1)
        learnt = np.concatenate([[0], np.cumsum(examples.answers)])
        labels = learnt[begins + kept] - learnt[np.minimum(begins + 1, examples.ends)]  # the first id is never a label
        long = lengths > sequence_length + 1
        chosen = np.flatnonzero((labels > 0) & (truncate | ~long))
        self.fitted = Fitted(len(lengths), int(long.sum()), int(lengths.max(initial=0)), len(lengths) - len(chosen))
        self._begins, self._ends = begins, begins + kept
        rows = pack(kept[chosen] - 1, sequence_length) if packing else [[i] for i in range(len(chosen))]
        order = np.random.default_rng(0).permutation(len(rows)) if packing else range(len(rows))
        self._rows = [chosen[rows[i]] for i in order]
        counts = [int(labels[row].sum()) for row in self._rows]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.count, self.labels = len(self._rows), int(self._before[-1])
        self.used = float(np.sum(kept[chosen] - 1) / max(self.count * sequence_length, 1))
        """Share of the rows that is no padding."""

    def read(self, row: int, limit: int | None = None) -> Row:
        length, at = self._length, 0
        tokens, segments, positions = (np.zeros(length, np.int32) for _ in range(3))
        labels = np.full(length, IGNORE, np.int32)
        members = self._rows[row] if limit is None or limit > 0 else []
        for number, example in enumerate(members, 1):
            part = slice(self._begins[example], self._ends[example])
            ids, answers = self._examples.ids[part], self._examples.answers[part]
            place = slice(at, at + len(ids) - 1)
            tokens[place], labels[place] = ids[:-1], np.where(answers[1:], ids[1:], IGNORE)
            segments[place], positions[place] = number, np.arange(len(ids) - 1)
            at = place.stop
        segments[at:] = len(members) + 1  # padding sees padding only
        positions[at:] = np.arange(length - at)
        if limit is not None:
            places = np.flatnonzero(labels != IGNORE)
            labels[places[max(limit - int(self._before[row]), 0) :]] = IGNORE
        return {"tokens": tokens, "labels": labels, "segment_ids": segments, "positions": positions}

    def count_for(self, limit: int) -> int:
        return int(np.searchsorted(self._before, limit, side="left"))

    def label_ids(self, limit: int) -> np.ndarray:
        found = [self.read(row, limit)["labels"] for row in range(self.count_for(limit))]
        labels = np.concatenate(found) if found else np.zeros(0, np.int32)
        return labels[labels != IGNORE]


def describe_fitted(path: str, rows: ExampleRows, sequence_length: int) -> str:
    """A line on how the examples of a source fill their rows, and which do not."""
    fitted = rows.fitted
    line = (
        f"{path}: {fitted.total - fitted.left_out:,} chats in {rows.count:,} rows of {sequence_length}, of which "
        f"{rows.used:.0%} is filled; {rows.labels:,} tokens of answers"
    )
    if fitted.too_long or fitted.left_out:
        line += (
            f"; {fitted.too_long:,} chats are too long (the longest: {fitted.longest:,} tokens; "
            f"see data.chat.too_long), {fitted.left_out:,} are left out as no answer of theirs fits"
        )
    return line
