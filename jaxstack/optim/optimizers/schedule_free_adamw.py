"""The schedule-free AdamW optimizer, which averages iterates instead of decaying the learning rate."""

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.optim.base import Optimizer, RunInfo


class ScheduleFreeState(NamedTuple):
    """Optimizer state of schedule-free AdamW: the unaveraged iterate z, the sum of averaging weights, AdamW's state."""

    z: PyTree
    """The point that AdamW's steps move."""
    largest_rate: jax.Array
    """[] float32: largest learning rate of the steps taken."""
    weight_sum: jax.Array
    """[] float32: sum of the weights of the steps in the average."""
    steps: jax.Array
    """[] int32: steps taken."""
    inner: optax.OptState
    """State of the AdamW step."""


class ScheduleFreeAdamW(Optimizer):
    """AdamW that averages its iterates instead of decaying the rate (Defazio et al. 2024, arXiv:2405.15682).

    The model's parameters are the averages x, which evaluations, checkpoints and exports use as they are; a step
    evaluates its gradient at (1 - b1) z + b1 x. Use `schedule.name: constant` with a warm-up. State: two float32 per
    weight.
    """

    averages_parameters: ClassVar[bool] = True

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    b1: float = Field(default=0.9, gt=0, lt=1)
    """Weight of the average in the point of the gradient; it acts as a momentum."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_power: float = Field(default=2.0, ge=0)
    """A step has the weight (largest learning rate so far)^weight_power in the average."""

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        return optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)

    def wrap(self, chain: optax.GradientTransformation, run: RunInfo) -> optax.GradientTransformation:
        def init(params: PyTree) -> ScheduleFreeState:
            zero = jnp.zeros((), jnp.float32)
            z = jax.tree.map(jnp.copy, params)
            return ScheduleFreeState(z, zero, zero, jnp.zeros((), jnp.int32), chain.init(params))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, ScheduleFreeState]:
            moves, inner = chain.update(updates, state.inner, self._point(state.z, params))
            z = jax.tree.map(jnp.add, state.z, moves)
            largest = jnp.maximum(state.largest_rate, run.learning_rate(state.steps))
            weight = largest**self.weight_power
            weight_sum = state.weight_sum + weight
            share = weight / jnp.maximum(weight_sum, jnp.finfo(jnp.float32).tiny)
            updates = jax.tree.map(lambda z, x: share * (z - x), z, params)
            return updates, ScheduleFreeState(z, largest, weight_sum, state.steps + 1, inner)

        return optax.GradientTransformation(init, update)

    def gradient_point(self, params: PyTree, state: optax.OptState) -> PyTree:
        def is_ours(x):
            return isinstance(x, ScheduleFreeState)

        (own,) = filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours))
        return self._point(own.z, params)

    def _point(self, z: PyTree, params: PyTree) -> PyTree:
        def interpolate(z: jax.Array | optax.MaskedNode, x: jax.Array) -> jax.Array:
            return x if isinstance(z, optax.MaskedNode) else (1 - self.b1) * z + self.b1 * x

        return jax.tree.map(interpolate, z, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
