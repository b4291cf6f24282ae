"""Spikes of loss and gradient norm: judged on the device against the median of the steps that were taken before."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WINDOW = 128
"""Taken steps that a new one is compared with."""
FEWEST = 20
"""Taken steps before any is judged."""
_LEAST_SPREAD = 0.01
"""Of the median: runs whose values hardly vary do not spike at every ripple."""


class StepHistory(NamedTuple):
    """Loss and gradient norm of the last steps that were taken; skipped ones leave no trace in it."""

    values: jax.Array
    """[2, WINDOW] float32: losses and norms, a ring."""
    count: jax.Array
    """[] int32: steps taken."""

    @classmethod
    def empty(cls) -> "StepHistory":
        """That of a fresh run."""
        return cls(jnp.zeros((2, WINDOW), jnp.float32), jnp.zeros((), jnp.int32))

    def plus(self, loss: jax.Array, norm: jax.Array) -> "StepHistory":
        """With one more step."""
        new = jnp.stack([loss, norm]).astype(jnp.float32)[:, None]
        values = jax.lax.dynamic_update_slice(self.values, new, (0, self.count % WINDOW))
        return StepHistory(values, self.count + 1)

    def limits(self, threshold: float) -> jax.Array:
        """[2] float32: what loss and norm may be at most: median + threshold x 1.4826 x median absolute deviation.

        1.4826 makes the deviation that of a normal distribution. Infinite until FEWEST steps were taken.
        """
        kept = jnp.minimum(self.count, WINDOW)
        median = _median(self.values, kept)
        spread = 1.4826 * _median(jnp.abs(self.values - median[:, None]), kept)
        spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(median))
        return jnp.where(self.count >= FEWEST, median + threshold * spread, jnp.inf)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """[2]: of the first `count` values of each row of [2, WINDOW]."""
    ordered = jnp.sort(jnp.where(jnp.arange(WINDOW) < count, values, jnp.inf), axis=1)
    return (ordered[:, jnp.maximum(count - 1, 0) // 2] + ordered[:, count // 2 % WINDOW]) / 2
