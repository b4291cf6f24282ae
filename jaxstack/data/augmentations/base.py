"""Base class of text augmentations, and what they share: documents split from rows, and a list applied to rows."""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from jaxstack.config.base import Component
from jaxstack.data.seeds import source_seed
from jaxstack.data.token_rows import IGNORE, Row
from jaxstack.errors import ConfigError

Document = tuple[np.ndarray, np.ndarray]
"""Tokens [n] and labels [n], int32, of a document or the part of one that is in the row."""


def split_row(row: Row, document_start: int) -> list[Document]:
    """Split a training row into its documents, in order; padding is returned as documents without labels."""
    tokens = row["tokens"]
    labels = row["labels"]
    if "segment_ids" in row:
        begins = np.flatnonzero(np.diff(row["segment_ids"])) + 1
    else:
        begins = np.flatnonzero(tokens[1:] == document_start) + 1
    return list(zip(np.split(tokens, begins), np.split(labels, begins), strict=True))


def join_documents(documents: Sequence[Document], like: Row, document_start: int) -> Row:
    """Concatenate documents into a training row, cut or padded to the length of the row `like`, with the same keys."""
    length = len(like["tokens"])
    room = length - sum(len(tokens) for tokens, _ in documents)
    if room > 0:
        padding = np.full(room, document_start, np.int32), np.full(room, IGNORE, np.int32)
        documents = [*documents, padding]
    tokens, labels = (np.concatenate(parts)[:length].astype(np.int32) for parts in zip(*documents, strict=True))
    row = {"tokens": tokens, "labels": labels}
    if "segment_ids" in like:
        sizes = [len(tokens) for tokens, _ in documents]
        numbers = np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), sizes)
        places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        row |= {"segment_ids": numbers[:length], "positions": places[:length]}
    return row


def has_targets(document: Document) -> bool:
    """Return True if at least one token of the document has a label to train on; padding has none."""
    return bool((document[1] != IGNORE).any())


def split_start_id(document: Document, document_start: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a document's ids into its document-start id (an array of 0 or 1 ids) and the ids after it."""
    tokens = document[0]
    opens = int(len(tokens) > 0 and tokens[0] == document_start)
    return tokens[:opens], tokens[opens:]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's document-start id and its number of ids, which text augmentations need."""

    document_start: int
    size: int
    """Number of ids of the tokenizer; those from here on are free for sentinels."""


class TextAugmentation(Component):
    """Base class of random changes to a row of training tokens; subclasses define `name` and `apply`.

    A subclass is listed in the table in `jaxstack.data.augmentations`.
    """

    changes_text: ClassVar[bool] = True
    """True if the targets change too, which chats, with their marked answers, do not allow."""
    needs_packing: ClassVar[bool] = False
    """True if documents must be kept apart by segment ids."""

    @property
    def sentinel_count(self) -> int:
        """Number of sentinel tokens whose ids the configuration leaves open and `with_sentinels` assigns."""
        return 0

    def with_sentinels(self, first: int) -> Self:
        """Return this augmentation with the ids `first`, `first + 1`, ... assigned to its sentinel tokens."""
        return self

    @property
    def largest_id(self) -> int:
        """Largest token id that the augmentation can add to a row; -1 if it adds none."""
        return -1

    @abstractmethod
    def apply(self, row: Row, random: np.random.Generator, vocabulary: Vocabulary) -> Row:
        """Return a randomly changed copy of a row of training tokens; the given row is not modified.

        Args:
          row: arrays [T] int32: tokens, labels, and with packing segment_ids and positions.
          random: the source of all randomness.
          vocabulary: ids of the tokenizer.
        """


@dataclasses.dataclass(frozen=True)
class Augmenter:
    """Applies augmentations to training rows, with randomness that depends only on the seed and a row's global index.

    A run therefore has the same rows on any number of processes and workers, and after a resume.
    """

    augmentations: tuple[TextAugmentation, ...]
    vocabulary: Vocabulary
    seed: int

    @classmethod
    def make(
        cls, chosen: Sequence[TextAugmentation], vocabulary: Vocabulary, seed: int, *, packing: bool, chats: bool
    ) -> "Augmenter":
        """Create the augmenter of a run; sentinel tokens without configured ids get ids that follow the tokenizer's.

        Args:
          chosen: the configured augmentations, in their order.
          vocabulary: ids of the tokenizer.
          seed: of the run.
          packing: rows have segment ids.
          chats: some rows are chats.

        Raises:
          ConfigError: an augmentation needs packing, or cannot be applied to chats.
        """
        complete = []
        free = vocabulary.size
        for one in chosen:
            name = getattr(one, "name", type(one).__name__)
            if one.needs_packing and not packing:
                raise ConfigError(f"data.augmentations: {name} needs data.packing=true, which keeps documents apart")
            if one.changes_text and chats:
                raise ConfigError(
                    f"data.augmentations: {name} rewrites whole documents, but a source has format chat, of which "
                    "only answers are trained on; leave it out, or train on text"
                )
            complete.append(one.with_sentinels(free))
            free += one.sentinel_count
        return cls(tuple(complete), vocabulary, source_seed(seed, "augmentations"))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of augmented rows: ids of the tokenizer and of the sentinel tokens."""
        return max([self.vocabulary.size, *(one.largest_id + 1 for one in self.augmentations)])

    def __call__(self, row: Row, sample: int) -> Row:
        """Apply all augmentations to the training row with the global index `sample`, and return the result."""
        for number, one in enumerate(self.augmentations):
            row = one.apply(row, np.random.default_rng((self.seed, number, sample)), self.vocabulary)
        return row
