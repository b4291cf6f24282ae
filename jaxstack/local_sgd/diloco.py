"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): an outer optimizer applies the mean of workers' changes."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxstack.local_sgd.base import Dict, OuterState, WorkerMethod
from jaxstack.local_sgd.reduction import Reduction, make_reduction


class OuterSGD(WorkerMethod):
    """Settings of the outer optimizer: SGD with Nesterov momentum on the workers' mean change between exchanges."""

    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Factor of the workers' mean progress; 1 without momentum is local SGD."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""

    def step(self, anchor: jax.Array, velocity: jax.Array, progress: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Take one Nesterov step along the workers' mean change; return the new parameter and velocity.

        Args:
          anchor: the parameter at the last exchange.
          velocity: decayed sum of earlier progress.
          progress: anchor minus the mean of the workers' parameters.
        """
        velocity = self.momentum * velocity + progress
        return anchor - self.outer_learning_rate * (progress + self.momentum * velocity), velocity


class DiLoCo(OuterSGD):
    """DiLoCo: workers train separately, and an outer optimizer applies their mean change every `every` steps."""

    name: Literal["diloco"] = "diloco"
    compression: Literal["none", "int8", "powersgd"] = "none"
    """Format of the communication between workers. none: float32; int8: 8-bit integers; powersgd: factors of low rank
    (Vogels et al. 2019, arXiv:1905.13727), while each worker keeps what its factors left out for the next exchange."""
    rank: int = Field(default=4, ge=1)
    """Rank of the factors of powersgd."""

    def build(self, workers: int, stacked: Mapping[str, Any]) -> "DiLoCoExchange":
        return DiLoCoExchange(self, make_reduction(self.compression, self.rank, workers))


class DiLoCoExchange:
    """DiLoCo's exchange: averages parameter changes over workers; an outer optimizer applies the mean.

    Args:
      settings: interval and outer optimizer.
      reduction: computes the mean over workers.
    """

    phases = 1

    def __init__(self, settings: OuterSGD, reduction: Reduction):
        self._settings = settings
        self._reduction = reduction

    def init(self, params: Dict) -> OuterState:
        """Return the initial state: parameters (`anchor`), zero momentum (`velocity`), and the averaging's state."""
        kept = self._reduction.init(params)
        velocity = jax.tree.map(jnp.zeros_like, params)
        return OuterState({"anchor": params, "velocity": velocity, **kept.shared}, kept.own)

    def due(self, step: int) -> int | None:
        """Return 0 (the number of the only exchange phase) if an exchange is due after this step, otherwise None."""
        return None if step % self._settings.every else 0

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Average parameter changes over workers; return new common parameters and the new state."""
        progress = jax.tree.map(jnp.subtract, state.shared["anchor"], params)
        progress, kept = self._reduction(progress, state)
        return self.apply(progress, OuterState({**state.shared, **kept.shared}, kept.own))

    def apply(self, progress: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Apply the workers' mean parameter change by Nesterov SGD; return the new parameters and state."""
        anchor = state.shared["anchor"]
        velocity = state.shared["velocity"]
        stepped = jax.tree.map(self._settings.step, anchor, velocity, progress)
        anchor, velocity = jax.tree.transpose(jax.tree.structure(anchor), jax.tree.structure((0, 0)), stepped)
        return anchor, state._replace(shared={**state.shared, "anchor": anchor, "velocity": velocity})
