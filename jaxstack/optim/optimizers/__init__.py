"""The registry of optimizers: each is implemented in its own file and listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.config.features import Excludes, Feature
from jaxstack.optim.base import Optimizer
from jaxstack.optim.mup import NO_WIDTH_RULE
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


def decay_note(optimizer: str | None, schedule: str | None) -> str | None:
    """Return a note if a schedule decays although the optimizer averages parameters, and so needs no decay.

    Args:
      optimizer: `optimizer.name` of a configuration.
      schedule: `schedule.name`.
    """
    averaging = [kind.model_fields["name"].default for kind in OPTIMIZERS if kind.averages_parameters]
    if optimizer not in averaging or schedule == "constant":
        return None
    return f"{optimizer} needs no decay of the learning rate: schedule.name=constant suits it"


def _is(kind: type[Optimizer], optimizer: Optimizer) -> bool:
    return isinstance(optimizer, kind)


def _feature(name: str, kind: type[Optimizer]) -> Feature:
    without_rule = Excludes("muP", "how its learning rate depends on the width is not known", NO_WIDTH_RULE)
    return Feature(
        name,
        "optimizer",
        functools.partial(_is, kind),
        (f"optimizer.name={kind.model_fields['name'].default}",),
        excludes=(without_rule,) if kind.width_powers is None else (),
    )


FEATURES = (
    _feature("Muon", Muon),
    _feature("SOAP", Soap),
    _feature("Shampoo", Shampoo),
    _feature("Sophia", Sophia),
    _feature("AdEMAMix", AdEMAMix),
    _feature("schedule-free AdamW", ScheduleFreeAdamW),
    _feature("Adam-mini", AdamMini),
    _feature("8-bit AdamW", AdamW8bit),
    _feature("Lion", Lion),
    _feature("Adafactor", Adafactor),
    _feature("SGD", SGD),
)
"""Every optimizer but AdamW, which excludes nothing, as a feature; see `jaxstack.config.features`."""
