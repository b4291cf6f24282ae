"""Augmentation that permutes the documents of a packed training row."""

from typing import ClassVar, Literal

import numpy as np

from jaxstack.data.augmentations.base import TextAugmentation, Vocabulary, has_targets, join_documents, split_row
from jaxstack.data.token_rows import Row


class RandomDocumentOrder(TextAugmentation):
    """Permutes the documents of each packed row, so that none has a fixed neighbour or place.

    Every token keeps its label. Padding stays at the end.
    """

    name: Literal["document_order"] = "document_order"
    changes_text: ClassVar[bool] = False
    needs_packing: ClassVar[bool] = True

    def apply(self, row: Row, random: np.random.Generator, vocabulary: Vocabulary) -> Row:
        documents = split_row(row, vocabulary.document_start)
        filled = [one for one in documents if has_targets(one)]
        padding = [one for one in documents if not has_targets(one)]
        order = random.permutation(len(filled))
        return join_documents([*(filled[i] for i in order), *padding], row, vocabulary.document_start)
