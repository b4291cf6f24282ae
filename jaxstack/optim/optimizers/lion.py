"""The Lion optimizer, which updates by the sign of a momentum."""

from typing import Literal

import optax
from pydantic import Field

from jaxstack.optim.base import ADAM_WIDTH_POWERS, Optimizer, RunInfo


class Lion(Optimizer):
    """Lion: updates by the sign of an interpolated momentum (Chen et al. 2023). State: one float32 per weight."""

    width_powers = ADAM_WIDTH_POWERS
    name: Literal["lion"] = "lion"
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=1.0, ge=0)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)
