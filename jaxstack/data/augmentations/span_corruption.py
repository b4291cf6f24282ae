"""Span corruption: documents with spans replaced by sentinels, followed by the spans as targets."""

from typing import Literal, Self

import numpy as np
from pydantic import Field

from jaxstack.data.augmentations.base import (
    Document,
    TextAugmentation,
    Vocabulary,
    has_targets,
    join_documents,
    split_row,
    split_start_id,
)
from jaxstack.data.token_rows import IGNORE, Row

_SHORTEST = 8
"""Documents with fewer tokens stay as they are."""


class SpanCorruption(TextAugmentation):
    """Replaces random spans of each document by sentinels, and appends the spans as targets.

    Raffel et al. 2020, arXiv:1910.10683, in the form for a causal model: `a b [0] e f [1] [0] c d [1] g`. Only what
    follows the corrupted document is trained on. A document is shortened, at its end, so that it takes no more room
    than before.
    """

    name: Literal["span_corruption"] = "span_corruption"
    rate: float = Field(default=1.0, gt=0, le=1)
    """Share of the documents that are corrupted."""
    noise_density: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens of a document in the spans."""
    mean_span: float = Field(default=3.0, ge=1)
    """Mean number of tokens of a span."""
    sentinels: int = Field(default=100, ge=1)
    """Number of sentinels, and so of spans of a document at most; spans of a very long one are longer."""
    first_sentinel: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Id of the first sentinel, the others follow it; null: the first that the tokenizer does not use, which makes the
    vocabulary larger."""

    @property
    def sentinel_count(self) -> int:
        return self.sentinels if self.first_sentinel is None else 0

    def with_sentinels(self, first: int) -> Self:
        return self if self.first_sentinel is not None else self.model_copy(update={"first_sentinel": first})

    @property
    def largest_id(self) -> int:
        return -1 if self.first_sentinel is None else self.first_sentinel + self.sentinels - 1

    def apply(self, row: Row, random: np.random.Generator, vocabulary: Vocabulary) -> Row:
        start = vocabulary.document_start
        documents = [
            self._corrupted(one, random, start) if random.random() < self.rate and has_targets(one) else one
            for one in split_row(row, start)
        ]
        return join_documents(documents, row, start)

    def _corrupted(self, document: Document, random: np.random.Generator, start: int) -> Document:
        opening, body = split_start_id(document, start)
        if len(body) < _SHORTEST:
            return document
        count = len(body)
        while count + 2 * self._spans(count) > len(body):
            count -= 1
        noise = self._noise(count)
        spans = self._spans(count)
        # Kept and noisy stretches alternate, and a kept one is first.
        kept_sizes = _random_parts(count - noise, spans, random)
        noise_sizes = _random_parts(noise, spans, random)
        borders = np.cumsum(np.stack([kept_sizes, noise_sizes], axis=1).ravel())[:-1]
        stretches = np.split(body[:count], borders)
        assert self.first_sentinel is not None
        marks = [np.array([self.first_sentinel + i], np.int32) for i in range(spans)]
        inputs = [opening, *(x for pair in zip(stretches[::2], marks, strict=True) for x in pair)]
        targets = [x for pair in zip(marks, stretches[1::2], strict=True) for x in pair]
        tokens = np.concatenate([*inputs, *targets]).astype(np.int32)
        labels = np.append(tokens[1:], np.int32(start))
        labels[: sum(map(len, inputs)) - 1] = IGNORE
        return tokens, labels

    def _noise(self, count: int) -> int:
        return min(max(round(count * self.noise_density), 1), count - 1)

    def _spans(self, count: int) -> int:
        noise = self._noise(count)
        return max(min(round(noise / self.mean_span), self.sentinels, noise, count - noise), 1)


def _random_parts(total: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Split `total` into `parts` positive sizes, chosen uniformly at random."""
    borders = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))
