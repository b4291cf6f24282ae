"""The table of optimizers. Each has a file of its own; only this table knows them all."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.optim.base import Optimizer
from jaxstack.optim.optimizers.adafactor import Adafactor
from jaxstack.optim.optimizers.adamw import AdamW
from jaxstack.optim.optimizers.lion import Lion
from jaxstack.optim.optimizers.muon import Muon
from jaxstack.optim.optimizers.sgd import SGD

OPTIMIZERS = (AdamW, Muon, Lion, Adafactor, SGD)
"""Every optimizer that `optimizer.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyOptimizer: TypeAlias = Optimizer
else:
    AnyOptimizer = Annotated[functools.reduce(operator.or_, OPTIMIZERS), Field(discriminator="name")]
