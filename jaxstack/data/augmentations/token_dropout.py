"""Token dropout: replaces random input tokens."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from jaxstack.data.augmentations.base import TextAugmentation, Vocabulary
from jaxstack.data.token_rows import Row


class TokenDropout(TextAugmentation):
    """Replaces each input token with probability `rate`; labels are unchanged (Bowman et al. 2016, arXiv:1511.06349).

    Document starts are never replaced.
    """

    name: Literal["token_dropout"] = "token_dropout"
    changes_text: ClassVar[bool] = False
    rate: float = Field(default=0.1, gt=0, lt=1)
    replacement_id: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """The id that takes their place; null: uniformly random ids of the tokenizer, without the document start."""

    @property
    def largest_id(self) -> int:
        return -1 if self.replacement_id is None else self.replacement_id

    def apply(self, row: Row, random: np.random.Generator, vocabulary: Vocabulary) -> Row:
        tokens = row["tokens"]
        start = vocabulary.document_start
        dropped = (random.random(tokens.shape) < self.rate) & (tokens != start)
        if self.replacement_id is not None:
            others = np.full(tokens.shape, self.replacement_id)
        else:
            others = random.integers(0, vocabulary.size - 1, tokens.shape)
            others += others >= start
        return {**row, "tokens": np.where(dropped, others, tokens).astype(np.int32)}
