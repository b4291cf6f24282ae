"""The registry of optimizers: each is implemented in its own file and listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.optim.base import Optimizer
from jaxstack.optim.optimizers.adafactor import Adafactor
from jaxstack.optim.optimizers.adam_mini import AdamMini
from jaxstack.optim.optimizers.adamw import AdamW
from jaxstack.optim.optimizers.adamw_8bit import AdamW8bit
from jaxstack.optim.optimizers.ademamix import AdEMAMix
from jaxstack.optim.optimizers.lion import Lion
from jaxstack.optim.optimizers.muon import Muon
from jaxstack.optim.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from jaxstack.optim.optimizers.sgd import SGD
from jaxstack.optim.optimizers.shampoo import Shampoo
from jaxstack.optim.optimizers.soap import Soap
from jaxstack.optim.optimizers.sophia import Sophia

OPTIMIZERS = (
    AdamW, Muon, Soap, Shampoo, Sophia, AdEMAMix, ScheduleFreeAdamW, AdamMini, AdamW8bit, Lion, Adafactor, SGD,
)  # fmt: skip
"""Every optimizer that `optimizer.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyOptimizer: TypeAlias = Optimizer
else:
    AnyOptimizer = Annotated[functools.reduce(operator.or_, OPTIMIZERS), Field(discriminator="name")]
