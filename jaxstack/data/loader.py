"""Opens the data of a run (`open_data`): endless training batches, and one exact pass over the held-out text."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from jaxstack.data.augmentations.base import Augmenter, Vocabulary
from jaxstack.data.build_shards import BuildOptions
from jaxstack.data.config import DataConfig
from jaxstack.data.fingerprint import list_sources
from jaxstack.data.mixture import order_hash, row_order
from jaxstack.data.read_batches import Batch, HeldOutBatches, TrainingBatches, WorkerOptions, read_batches
from jaxstack.data.streams import Streams, open_streams
from jaxstack.data.token_rows import (
    ExampleRows,
    ExampleSet,
    PairRows,
    Rows,
    Stream,
    TextRows,
    describe_row_filling,
)
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError


def open_data(
    config: DataConfig,
    *,
    sequence_length: int,
    seed: int,
    report: Callable[[str], None] | None = None,
    workers: int = 1,
    mismatched: bool = False,
) -> "Data":
    """Tokenize the sources of a run's data (once, into the cache), verify the token shards, and open them.

    Args:
      config: sources, tokenizer, split, packing.
      sequence_length: T, tokens in a row.
      seed: decides the order of rows, and nothing else.
      report: called with a line of text when something takes time or deserves notice.
      workers: largest number of tokenizing processes; with more than one the calling script needs
        `if __name__ == "__main__"`, as `multiprocessing` does.
      mismatched: preferences get a third row, each prompt with another pair's chosen answer; see `PairRows`.

    Raises:
      ConfigError: sources that do not exist or cannot be read as configured, or too little text for one row.
      JaxstackError: damaged shards or files; the message names the file.
    """
    if sequence_length < 1:
        raise ConfigError(f"sequence_length is {sequence_length}, it must be at least 1")
    say = report or (lambda message: None)
    streams = open_streams(config, seed, BuildOptions(config.shard_tokens, workers, say))
    data = Data(config, streams, sequence_length, seed, mismatched=mismatched)
    data.describe_chats(say)
    if 0 < data.held_out_tokens < sequence_length and not data.pairs:
        say(f"held out are only {data.held_out_tokens} tokens, less than a row of {sequence_length}: padded")
    return data


class Data:
    """Training batches in a fixed global order, and held-out batches, of one run; made by `open_data`.

    Global sample `k * B + s` is row `s` of global batch `k`, whatever the number of processes. A position in the data
    is therefore one integer: the number of the next batch.

    Dimensions: B global batch, T sequence length.
    """

    def __init__(
        self, config: DataConfig, streams: Streams, sequence_length: int, seed: int, *, mismatched: bool = False
    ):
        self.tokenizer: Tokenizer = streams.tokenizer
        self.sequence_length = sequence_length
        self._config = config
        self._mismatched = mismatched
        self._seed = seed
        self._train = streams.train
        self._held_out = streams.held_out
        self._source_listing = list_sources(streams.files)
        self._rows = [self._rows_of(stream) for stream in self._train]
        self._held_out_rows = [self._rows_of(stream) for stream in self._held_out]
        self._check_enough()
        counts = [rows.count for rows in self._rows]
        self.rows_per_epoch = tuple(counts)
        self._order = row_order(counts, [s.weight for s in config.sources], seed, config.shuffle)
        self._workers = WorkerOptions(config.read_threads, config.read_processes, config.read_ahead)
        self._augment = self._augmenter()

    def _augmenter(self) -> Augmenter:
        """Return the `Augmenter` of the configured augmentations; raise an error if one does not suit the data."""
        if self._config.augmentations and self.pairs:
            raise ConfigError("data.augmentations change rows of text; leave them out for sources of format preference")
        chats = any(isinstance(rows, ExampleRows) for rows in self._rows)
        ids = Vocabulary(self.tokenizer.document_start, self.tokenizer.vocab_size)
        chosen = self._config.augmentations
        packing = self._config.packing
        return Augmenter.make(chosen, ids, self._seed, packing=packing, chats=chats)

    def _check_enough(self) -> None:
        for source, stream, rows in zip(self._config.sources, self._train, self._rows, strict=True):
            if isinstance(rows, ExampleRows):
                self._check_chats(source.path, rows)
            elif stream.tokens <= self.sequence_length:
                raise ConfigError(
                    f"the data source {source.path!r} has {stream.tokens} training tokens, one row of "
                    f"sequence_length {self.sequence_length} needs {self.sequence_length + 1}: use a shorter "
                    "sequence or more text"
                )
        wanted = self._config.held_out or self._config.held_out_fraction
        if wanted and not self._held_out:
            raise ConfigError(
                f"no text is held out: held_out_fraction {self._config.held_out_fraction} of "
                f"{self.train_tokens} training tokens left nothing; raise it, give held_out sources, "
                "or set held_out_fraction to 0 for a run without evaluation"
            )

    def _rows_of(self, stream: Stream | ExampleSet) -> Rows:
        packing = self._config.packing
        cut = self._config.chat.too_long == "truncate"
        if isinstance(stream, ExampleSet):
            if stream.pairs:
                return PairRows(stream, self.sequence_length, mismatched=self._mismatched)
            return ExampleRows(stream, self.sequence_length, truncate=cut, packing=packing)
        return TextRows(stream, self.sequence_length, packing)

    def _check_chats(self, path: str, rows: ExampleRows) -> None:
        fitted = rows.fitted
        length = self.sequence_length
        too_long = self._config.chat.too_long
        pairs = isinstance(rows, PairRows)
        word, way = ("pairs", "drop, as answers are not cut") if pairs else ("chats", "truncate or drop")
        if fitted.too_long and (too_long == "refuse" or (pairs and too_long == "truncate")):
            raise ConfigError(
                f"{fitted.too_long:,} of {fitted.total:,} {word} of {path!r} have more than sequence_length ({length}) "
                f"tokens, the longest {fitted.longest:,}: raise it, or set data.chat.too_long to {way}"
            )
        if not rows.count:
            raise ConfigError(
                f"none of the {word} of {path!r} has an answer within sequence_length ({length}) tokens: raise it, or "
                "see data.chat.too_long"
            )

    @property
    def pairs(self) -> bool:
        """True if the rows are pairs of answers, from sources of format preference."""
        return any(isinstance(rows, PairRows) for rows in self._rows)

    @property
    def pair_rows(self) -> list[PairRows]:
        """The rows of all sources that are pairs of answers, those of the held-out pairs after those for training."""
        return [rows for rows in (*self._rows, *self._held_out_rows) if isinstance(rows, PairRows)]

    @property
    def vocab_size(self) -> int:
        """Vocabulary size that the batches need: the tokenizer's ids plus the sentinel tokens of augmentations."""
        return self._augment.vocab_size

    @property
    def train_tokens(self) -> int:
        """Number of tokens in one epoch over all training sources."""
        return sum(s.tokens for s in self._train)

    @property
    def held_out_tokens(self) -> int:
        """Number of held-out tokens that an evaluation predicts, within the limit `held_out_max_bytes`."""
        return sum(self._held_out_limits(None))

    def describe(self) -> str:
        """Return the numbers of tokens as text."""
        return f"{self.train_tokens:,} training and {self.held_out_tokens:,} held-out tokens"

    @property
    def fingerprint(self) -> dict:
        """Description of the data as plain JSON, equal if and only if the batches are; compared when resuming."""
        # Causes before effects: other tokens give other shards, and only the first difference is shown in full.
        chats = any(isinstance(rows, ExampleRows) for rows in (*self._rows, *self._held_out_rows))
        return {
            **({"too_long": self._config.chat.too_long} if chats else {}),
            "tokenizer": self.tokenizer.hash,
            "weights": [s.weight for s in self._config.sources],
            "shards": [_joint_hash(s) for s in self._train],
            "held_out_shards": [_joint_hash(s) for s in self._held_out],
            "seed": self._seed,
            "sequence_length": self.sequence_length,
            "packing": self._config.packing,
            "shuffle": self._config.shuffle,
            "augmentations": [one.model_dump(mode="json") for one in self._config.augmentations],
            "order": order_hash(self._order),
        }

    @property
    def source_listing(self) -> list[dict[str, Any]]:
        """The files of each source as plain JSON, for messages about changed data; see `list_sources`."""
        return self._source_listing

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[Batch]:
        """Yield endlessly the rows at indices `rows` of each global training batch, from batch number `start` on.

        Grain's workers read ahead; they stop when the iterator is closed.

        Args:
          global_batch_size: B.
          rows: rows of the global batch that this process reads, each in 0..B-1, in the order wanted.
          start: number of the first global batch.

        Yields:
          tokens, labels [len(rows), T] int32, and with packing segment_ids, positions [len(rows), T] int32. Of
          preferences tokens, labels [len(rows), 2, T] int32 and margin [len(rows)] float32.
        """
        return read_batches(self._batches(global_batch_size, rows, start), self._workers)

    def batch(self, number: int, *, global_batch_size: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows at indices `rows` of one global training batch, read in the calling thread; see `batches`."""
        return self._batches(global_batch_size, rows, number)[0]

    def _batches(self, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> TrainingBatches:
        picked = _checked_rows(rows, global_batch_size)
        if start < 0:
            raise ConfigError(f"start is {start}, the number of a batch is at least 0")
        order = cast(Sequence[tuple[int, int]], self._order)
        return TrainingBatches(order, self._rows, picked, global_batch_size, start, self._augment)

    def held_out_batches(
        self, *, batch_size: int, rows: Sequence[int] | np.ndarray, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        """Yield every held-out token once (or the first `max_tokens`), in the same number of batches on each process.

        Args:
          batch_size: number of rows of a batch over all processes.
          rows: rows of each batch that this process reads.
          max_tokens: limit on the predicted tokens, up to which pairs of answers count whole; default: all.

        Yields:
          Batches as `batches` does; labels of rows and positions after the end are -100. Nothing without held-out text.
        """
        wanted = _checked_rows(rows, batch_size)
        limits = self._held_out_limits(max_tokens)
        places = [
            (rows, row, limit)
            for rows, limit in zip(self._held_out_rows, limits, strict=True)
            for row in range(rows.count_for(limit))
        ]
        if not places:
            return iter(())
        return read_batches(HeldOutBatches(places, wanted, batch_size), self._workers)

    def held_out_bytes(self, max_tokens: int | None = None) -> bytes:
        """Return the held-out text that `held_out_batches` predicts, in order, as bytes; used to compute bits per byte.

        The sum of the losses in bits over these batches, divided by this number of bytes, is the bits per byte.
        Document-start labels are predicted too but are no bytes, so that a model pays for predicting where texts end.
        """
        limits = self._held_out_limits(max_tokens)
        parts = (rows.label_ids(limit) for rows, limit in zip(self._held_out_rows, limits, strict=True))
        return b"".join(self.tokenizer.decode_bytes(ids) for ids in parts)

    def describe_chats(self, say: Callable[[str], None]) -> None:
        """Call `say` with a line per source of chats: how full its rows are, and how many chats are cut or left out."""
        for source, rows in zip(self._config.sources, self._rows, strict=True):
            if isinstance(rows, ExampleRows):
                say(describe_row_filling(source.path, rows, self.sequence_length))

    def close(self) -> None:
        """Close the files of token shards."""
        for stream in (*self._train, *self._held_out):
            stream.close()

    def _held_out_limits(self, max_tokens: int | None) -> list[int]:
        """Return, for each held-out source, the number of tokens that an evaluation predicts.

        A limit `max_tokens` is shared in proportion to their sizes.
        """
        sizes = [rows.labels for rows in self._held_out_rows]
        total = sum(sizes)
        if self._config.held_out_max_bytes is not None:
            share = self._config.held_out_max_bytes / max(len(sizes), 1)
            sizes = [min(n, self._tokens_in_bytes(r, share)) for r, n in zip(self._held_out_rows, sizes, strict=True)]
            total = sum(sizes)
        if max_tokens is None or max_tokens >= total:
            return sizes
        limits = [n * max_tokens // total for n in sizes]
        for i in range(max_tokens - sum(limits)):
            limits[i] += 1
        return limits

    def _tokens_in_bytes(self, rows: Rows, limit: float) -> int:
        """Return how many of a source's first predicted tokens fit in `limit` bytes of text in total; at least one."""
        ids = rows.label_ids(int(limit) + 1)
        total = np.cumsum(self.tokenizer.byte_lengths[ids])
        return max(int(np.searchsorted(total, limit, side="right")), 1)


def _joint_hash(stream: Stream | ExampleSet) -> str:
    """Combine the hashes of all shards of a token stream into one."""
    return hashlib.sha256(" ".join(stream.hashes).encode()).hexdigest()


def _checked_rows(rows: Sequence[int] | np.ndarray, batch_size: int) -> list[int]:
    wanted = [int(r) for r in rows]
    if not wanted or min(wanted) < 0 or max(wanted) >= batch_size:
        raise ConfigError(f"rows must lie in 0..{batch_size - 1} of a batch of {batch_size}, and there must be one")
    return wanted
