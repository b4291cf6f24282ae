"""The AdamW optimizer."""

from typing import Literal

import optax
from pydantic import Field

from jaxstack.optim.base import ADAM_WIDTH_POWERS, Optimizer, RunInfo


class AdamW(Optimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019). State: two float32 per weight."""

    width_powers = ADAM_WIDTH_POWERS
    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.1, ge=0)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)
