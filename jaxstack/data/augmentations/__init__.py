"""Registry of the text augmentations that a configuration can choose by name; add new classes here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.data.augmentations.base import TextAugmentation
from jaxstack.data.augmentations.document_order import RandomDocumentOrder
from jaxstack.data.augmentations.fill_in_the_middle import FillInTheMiddle
from jaxstack.data.augmentations.span_corruption import SpanCorruption
from jaxstack.data.augmentations.token_dropout import TokenDropout

TEXT_AUGMENTATIONS = (FillInTheMiddle, SpanCorruption, TokenDropout, RandomDocumentOrder)
"""Every augmentation that `data.augmentations` can choose by `name`. A new one is added here."""

if TYPE_CHECKING:
    AnyTextAugmentation: TypeAlias = TextAugmentation
else:
    AnyTextAugmentation = Annotated[functools.reduce(operator.or_, TEXT_AUGMENTATIONS), Field(discriminator="name")]
