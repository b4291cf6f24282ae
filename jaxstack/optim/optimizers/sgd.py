"""The SGD optimizer (stochastic gradient descent), optionally with momentum."""

from typing import Literal

import optax
from pydantic import Field

from jaxstack.optim.base import Optimizer, RunInfo


class SGD(Optimizer):
    """SGD with momentum, optionally Nesterov's. State: one float32 per weight, none without momentum."""

    width_powers = {"input": 1.0, "hidden": 0.0, "output": -1.0, "final_gain": -1.0}
    scales_with_gradient = True
    name: Literal["sgd"] = "sgd"
    learning_rate: float = Field(default=0.1, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
