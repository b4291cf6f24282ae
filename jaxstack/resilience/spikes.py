"""Spikes of loss and gradient norm, detected on the device by comparison with the median of earlier steps."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

WINDOW = 128
"""Number of earlier steps, without skipped ones, that a step is compared with."""
FEWEST = 20
"""Number of steps before any is judged."""
_LEAST_SPREAD = 0.01
"""Lower bound of the spread as a fraction of the median, for runs whose values hardly vary."""


class StepHistory(NamedTuple):
    """Loss and gradient norm of the last 128 steps that were not skipped, from which spikes are detected."""

    values: jax.Array
    """[2, WINDOW] float32: ring buffer of losses and norms."""
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - its name is part of saved checkpoints
    """[] int32: number of steps, without skipped ones."""

    @classmethod
    def empty(cls) -> "StepHistory":
        """Return the empty history of a new run."""
        return cls(jnp.zeros((2, WINDOW), jnp.float32), jnp.zeros((), jnp.int32))

    def plus(self, loss: jax.Array, norm: jax.Array) -> "StepHistory":
        """Return the history with the loss and gradient norm of one more step."""
        chex.assert_shape([loss, norm], ())
        new = jnp.stack([loss, norm]).astype(jnp.float32)[:, None]
        values = jax.lax.dynamic_update_slice(self.values, new, (0, self.count % WINDOW))
        return StepHistory(values, self.count + 1)

    def limits(self, threshold: float) -> jax.Array:
        """Return spike limits [2] of loss and gradient norm: median + threshold x 1.4826 x median absolute deviation.

        The factor 1.4826 gives the standard deviation of a normal distribution. Infinite before FEWEST steps.
        """
        kept = jnp.minimum(self.count, WINDOW)
        median = _median(self.values, kept)
        spread = 1.4826 * _median(jnp.abs(self.values - median[:, None]), kept)
        spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(median))
        return jnp.where(self.count >= FEWEST, median + threshold * spread, jnp.inf)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median [2] of the first `count` values in each row of `values`, [2, WINDOW]."""
    ordered = jnp.sort(jnp.where(jnp.arange(WINDOW) < count, values, jnp.inf), axis=1)
    return (ordered[:, jnp.maximum(count - 1, 0) // 2] + ordered[:, count // 2 % WINDOW]) / 2
