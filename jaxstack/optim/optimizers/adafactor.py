"""The Adafactor optimizer, with second moments factored into rows and columns."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jaxstack.optim.base import Optimizer, RunInfo

_SMALLEST_SCALE = 1e-3
"""Lower bound of a parameter's scale, so that a parameter that starts at 0 is updated."""


class Adafactor(Optimizer):
    """Adafactor: second moments factored into rows and columns (Shazeer & Stern 2018). State: O(rows + columns)."""

    name: Literal["adafactor"] = "adafactor"
    learning_rate: float = Field(default=1e-2, gt=0)
    decay_rate: float = Field(default=0.8, gt=0, lt=1)
    """Exponent in the decay of the second moment, 1 - step^-decay_rate."""
    clipping_threshold: float | None = Field(default=1.0, gt=0)
    """Upper bound of the root mean square of each parameter's update; null: none."""
    multiply_by_parameter_scale: bool = True
    """Multiply the update of each parameter by the parameter's root mean square."""
    min_dim_size_to_factor: int = Field(default=128, ge=1)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        factored = optax.scale_by_factored_rms(
            decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_dim_size_to_factor
        )
        return optax.chain(factored)

    def finish(self, update: jax.Array, param: jax.Array) -> jax.Array:
        if self.clipping_threshold is not None:
            update = update / jnp.maximum(1.0, _root_mean_square(update) / self.clipping_threshold)
        if self.multiply_by_parameter_scale:
            update = update * jnp.maximum(_root_mean_square(param), _SMALLEST_SCALE)
        return update


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))
