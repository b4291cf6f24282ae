"""Fill-in-the-middle: documents reordered so that a causal model learns to insert text."""

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

_SHORTEST = 3
"""Tokens that a document needs for a prefix, a middle and a suffix."""


class FillInTheMiddle(TextAugmentation):
    """Cuts documents at two random places into prefix, middle and suffix, and puts the middle last.

    Bavarian et al. 2022, arXiv:2207.14255. With the sentinels P, S and M a document becomes `P prefix S suffix M
    middle` (PSM) or `P S suffix M prefix middle` (SPM), three ids longer; what no longer fits at the end of the row is
    cut. The documents are those in the row, so the end of a long one is part of another row. All tokens are targets.
    """

    name: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    rate: float = Field(default=0.5, gt=0, le=1)
    """Share of the documents that are reordered."""
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of these that are in the order SPM instead of PSM."""
    sentinel_ids: tuple[int, int, int] | None = None
    """Ids of P, S and M; null: the first that the tokenizer does not use, which make the vocabulary larger."""

    @property
    def sentinel_count(self) -> int:
        return 3 if self.sentinel_ids is None else 0

    def with_sentinels(self, first: int) -> Self:
        return self if self.sentinel_ids else self.model_copy(update={"sentinel_ids": (first, first + 1, first + 2)})

    @property
    def largest_id(self) -> int:
        return max(self.sentinel_ids or (-1,))

    def apply(self, row: Row, random: np.random.Generator, vocabulary: Vocabulary) -> Row:
        start = vocabulary.document_start
        documents = [
            self._reordered(one, random, start) if random.random() < self.rate and has_targets(one) else one
            for one in split_row(row, start)
        ]
        return join_documents(documents, row, start)

    def _reordered(self, document: Document, random: np.random.Generator, start: int) -> Document:
        opening, body = split_start_id(document, start)
        if len(body) < _SHORTEST:
            return document
        assert self.sentinel_ids is not None
        prefix_id, suffix_id, middle_id = ([one] for one in self.sentinel_ids)
        prefix, middle, suffix = np.split(body, np.sort(random.integers(0, len(body) + 1, 2)))
        if random.random() < self.spm_rate:
            parts = (opening, prefix_id, suffix_id, suffix, middle_id, prefix, middle)
        else:
            parts = (opening, prefix_id, prefix, suffix_id, suffix, middle_id, middle)
        tokens = np.concatenate(parts).astype(np.int32)
        # A document that the row cuts off has no known end after its middle.
        end = start if document[1][-1] == start else IGNORE
        return tokens, np.append(tokens[1:], np.int32(end))
