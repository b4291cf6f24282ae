"""Training rows of T tokens: cut from a stream of text, packed from whole examples such as chats, or pairs of answers.

Dimensions: T sequence length.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxstack.errors import ConfigError

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


Row = dict[str, np.ndarray]


@runtime_checkable
class ExampleSet(Protocol):
    """Interface of concatenated, tokenized chats or preferences; see `jaxstack.data.chat.Examples`."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def answers(self) -> np.ndarray: ...

    @property
    def ends(self) -> np.ndarray: ...

    @property
    def margins(self) -> np.ndarray: ...

    @property
    def pairs(self) -> bool: ...

    @property
    def tokens(self) -> int: ...

    @property
    def hashes(self) -> list[str]: ...

    def close(self) -> None: ...


class Rows(Protocol):
    """Interface of the training rows of a data source, which are read by number."""

    count: int
    labels: int
    """Number of ids that are predicted, in all rows together."""

    def read(self, row: int, limit: int | None = None) -> Row:
        """Return a row as int32 arrays [T], or [2, T]; all labels after the source's first `limit` become -100."""
        ...

    def count_for(self, limit: int) -> int:
        """Return the number of rows that contain the first `limit` labels, counted over all rows in order."""
        ...

    def label_ids(self, limit: int) -> np.ndarray:
        """Return the token ids of the first `limit` labels, counted over all rows in order."""
        ...


class TextRows:
    """Training rows cut from a token stream every T tokens, wherever documents begin and end.

    Each row except the last has T labels.
    """

    def __init__(self, stream: Stream, sequence_length: int, packing: bool):
        self._stream = stream
        self._length = sequence_length
        self._packing = packing
        self.count = row_count(stream.tokens, sequence_length)
        self.labels = max(stream.tokens - 1, 0)

    def read(self, row: int, limit: int | None = None) -> Row:
        places = self._stream.tokens if limit is None else limit + 1 if limit else 0
        ids = read_row(self._stream, row, self._length, places)
        return {name: x[0] for name, x in make_batch([ids], self._stream.document_start, self._packing).items()}

    def count_for(self, limit: int) -> int:
        return row_count(limit + 1, self._length)

    def label_ids(self, limit: int) -> np.ndarray:
        return self._stream.read(1, limit)


@dataclasses.dataclass(frozen=True)
class LengthStatistics:
    """Counts of a source's chats, for messages: all, those longer than a row, and those left out."""

    total: int
    too_long: int
    """Number of examples with more than T tokens."""
    longest: int
    """Number of tokens of the longest example."""
    left_out: int
    """Number of examples without any answer that fits, or that were dropped."""


class ExampleRows:
    """Training rows packed from whole chats: longest first, each into the fullest row with enough room.

    Packed rows are then shuffled with a fixed seed.

    Args:
      examples: the examples.
      sequence_length: T.
      truncate: cut examples that are longer than a row; False: leave them out.
      packing: False: one example per row.
    """

    def __init__(self, examples: ExampleSet, sequence_length: int, *, truncate: bool, packing: bool):
        self._examples = examples
        self._length = sequence_length
        begins, lengths, kept, labels = _measure(examples, sequence_length)
        long = lengths > sequence_length + 1
        chosen = np.flatnonzero((labels > 0) & (truncate | ~long))
        self.fitted = LengthStatistics(
            len(lengths), int(long.sum()), int(lengths.max(initial=0)), len(lengths) - len(chosen)
        )
        self._begins = begins
        self._ends = begins + kept
        rows = pack(kept[chosen] - 1, sequence_length) if packing else [[i] for i in range(len(chosen))]
        order = np.random.default_rng(0).permutation(len(rows)) if packing else range(len(rows))
        self._rows = [chosen[rows[i]] for i in order]
        counts = [int(labels[row].sum()) for row in self._rows]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.count = len(self._rows)
        self.labels = int(self._before[-1])
        self.used = float(np.sum(kept[chosen] - 1) / max(self.count * sequence_length, 1))
        """Fraction of the rows that is not padding."""

    def read(self, row: int, limit: int | None = None) -> Row:
        length = self._length
        at = 0
        tokens, segments, positions = (np.zeros(length, np.int32) for _ in range(3))
        labels = np.full(length, IGNORE, np.int32)
        members = self._rows[row] if limit is None or limit > 0 else []
        for number, example in enumerate(members, 1):
            part = slice(self._begins[example], self._ends[example])
            ids = self._examples.ids[part]
            answers = self._examples.answers[part]
            place = slice(at, at + len(ids) - 1)
            tokens[place] = ids[:-1]
            labels[place] = np.where(answers[1:], ids[1:], IGNORE)
            segments[place] = number
            positions[place] = np.arange(len(ids) - 1)
            at = place.stop
        segments[at:] = len(members) + 1  # its own segment, so that padding attends only to padding
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


class PairRows(ExampleRows):
    """Pairs of a chosen and a rejected answer, each after its prompt in a row of T tokens; a pair is never divided.

    A row has all tokens of its text, also the last one, at which a reward model reads its reward. Pairs of which a row
    is too long are left out: a cut would take the end of one answer only, and so teach a length.

    Args:
      examples: preferences.
      sequence_length: T.
      mismatched: add to each pair its prompt with the chosen answer of the next pair (the rejected one if that has no
        other), cut after T tokens. An answer of a pair may then be missing, and has no labels.

    Raises:
      ConfigError: an answer is missing, without `mismatched`.
    """

    def __init__(self, examples: ExampleSet, sequence_length: int, *, mismatched: bool = False):
        self._examples = examples
        self._length = sequence_length
        self._mismatched = mismatched
        begins, lengths, _, labels = (x.reshape(-1, 2) for x in _measure(examples, sequence_length))
        self._begins = begins
        self._ends = begins + lengths
        if not mismatched and (lengths == 0).any():
            alone = int((lengths == 0).any(axis=1).sum())
            raise ConfigError(
                f"{alone:,} of {len(lengths):,} preferences have one answer only, which is for preference.loss=kto; "
                "set that, or give each a chosen and a rejected answer."
            )
        long = (lengths > sequence_length).any(axis=1)
        chosen = np.flatnonzero(~long & ((labels > 0) | (lengths == 0)).all(axis=1) & (labels > 0).any(axis=1))
        self.fitted = LengthStatistics(
            len(lengths), int(long.sum()), int(lengths.max(initial=0)), len(lengths) - len(chosen)
        )
        self._pairs = chosen
        self._before = np.concatenate([[0], np.cumsum(labels[chosen].sum(axis=1), dtype=np.int64)])
        self.count = len(chosen)
        self.labels = int(self._before[-1])
        self.used = float(np.sum(lengths[chosen]) / max(2 * self.count * sequence_length, 1))
        self.references: np.ndarray | None = None
        """[count, 2 or 3] float32: log-probabilities under a reference, which rows have too once they are set."""

    @property
    def identity(self) -> list[object]:
        """Everything that the tokens and labels of the rows depend on, as plain JSON."""
        return [self._examples.hashes, self._length, self._mismatched]

    def read(self, row: int, limit: int | None = None) -> Row:
        """Return a pair: tokens, labels [2, T] int32, of the chosen answer first, and its margin [] float32.

        With `mismatched` tokens and labels are [3, T]. With `references` there is also reference [2 or 3] float32.
        """
        shape = (3 if self._mismatched else 2, self._length)
        tokens = np.zeros(shape, np.int32)
        labels = np.full(shape, IGNORE, np.int32)
        known = {} if self.references is None else {"reference": self.references[row]}
        if limit is not None and limit <= self._before[row]:
            return {"tokens": tokens, "labels": labels, "margin": np.zeros((), np.float32), **known}
        pair = self._pairs[row]
        texts = [self._text(pair, side) for side in (0, 1)]
        if self._mismatched:
            texts.append(
                self._with_answer_of(self._first_text(pair), self._first_text(self._pairs[(row + 1) % self.count]))
            )
        for side, (ids, answers) in enumerate(texts):
            tokens[side, : len(ids)] = ids
            labels[side, : max(len(ids) - 1, 0)] = np.where(answers[1:], ids[1:], IGNORE)
        return {"tokens": tokens, "labels": labels, "margin": np.asarray(self._examples.margins[pair]), **known}

    def _text(self, pair: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and answer mask [n] of a prompt with its chosen (side 0) or rejected answer."""
        part = slice(self._begins[pair, side], self._ends[pair, side])
        return self._examples.ids[part], self._examples.answers[part]

    def _first_text(self, pair: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and answer mask of the chosen answer, or of the rejected one if there is no other."""
        return self._text(pair, 0 if self._ends[pair, 0] > self._begins[pair, 0] else 1)

    def _with_answer_of(
        self, text: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and answer mask of a text's prompt with another text's answer, cut after T tokens."""
        prompt, answer = (int(np.argmax(answers)) for _, answers in (text, other))
        ids, answers = (np.concatenate([x[:prompt], y[answer:]]) for x, y in zip(text, other, strict=True))
        return ids[: self._length], answers[: self._length]


def _measure(examples: ExampleSet, sequence_length: int) -> tuple[np.ndarray, ...]:
    """Return first position, length, length within a row, and number of labels within a row of each example, [E]."""
    begins = np.concatenate([[0], examples.ends[:-1]]).astype(np.int64)[: len(examples.ends)]
    lengths = examples.ends - begins
    kept = np.minimum(lengths, sequence_length + 1)
    answers_before = np.concatenate([[0], np.cumsum(examples.answers)])
    # The first id of an example is never a label.
    labels = answers_before[begins + kept] - answers_before[np.minimum(begins + 1, examples.ends)]
    return begins, lengths, kept, labels


def describe_row_filling(path: str, rows: ExampleRows, sequence_length: int) -> str:
    """Return a line on how full the rows of a source's chats or pairs are, and how many of these do not fit."""
    fitted = rows.fitted
    if isinstance(rows, PairRows):
        left_out = f"; {fitted.left_out:,} are left out as too long (the longest: {fitted.longest:,} tokens)"
        return (
            f"{path}: {rows.count:,} pairs of answers in rows of {sequence_length}, of which {rows.used:.0%} is filled"
            f"; {rows.labels:,} tokens of answers{left_out if fitted.left_out else ''}"
        )
    line = (
        f"{path}: {fitted.total - fitted.left_out:,} chats in {rows.count:,} rows of {sequence_length}, of which "
        f"{rows.used:.0%} is filled; {rows.labels:,} tokens of answers"
    )
    if fitted.too_long or fitted.left_out:
        line += (
            f"; {fitted.too_long:,} chats are too long (the longest: {fitted.longest:,} tokens; "
            f"see data.chat.too_long), {fitted.left_out:,} are left out as no answer in them fits"
        )
    return line
