"""Detects loss spikes, and counts training steps that were skipped for a bad loss or gradient."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxstack.resilience.config import ResilienceConfig

HISTORY = 128
"""Number of earlier steps, without skipped ones, that a step is compared with."""
FEWEST = 20
"""Number of steps before any is judged."""
_LEAST_SPREAD = 0.01
"""Lower bound of the spread as a fraction of the median, for runs whose values hardly vary."""


class StepHistory(NamedTuple):
    """Loss and gradient norm of the last 128 steps that were not skipped, from which spikes are detected."""

    values: jax.Array
    """[2, HISTORY] float32: ring buffer of losses and norms."""
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - its name is part of saved checkpoints
    """[] int32: number of steps, without skipped ones."""

    @classmethod
    def empty(cls) -> "StepHistory":
        """Return the empty history of a new run."""
        return cls(jnp.zeros((2, HISTORY), jnp.float32), jnp.zeros((), jnp.int32))

    def plus(self, loss: jax.Array, norm: jax.Array) -> "StepHistory":
        """Return the history with the loss and gradient norm of one more step."""
        chex.assert_shape([loss, norm], ())
        new = jnp.stack([loss, norm]).astype(jnp.float32)[:, None]
        values = jax.lax.dynamic_update_slice(self.values, new, (0, self.count % HISTORY))
        return StepHistory(values, self.count + 1)

    def limits(self, threshold: float) -> jax.Array:
        """Return spike limits [2] of loss and gradient norm: median + threshold x 1.4826 x median absolute deviation.

        The factor 1.4826 gives the standard deviation of a normal distribution. Infinite before FEWEST steps.
        """
        kept = jnp.minimum(self.count, HISTORY)
        median = _median(self.values, kept)
        spread = 1.4826 * _median(jnp.abs(self.values - median[:, None]), kept)
        spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(median))
        return jnp.where(self.count >= FEWEST, median + threshold * spread, jnp.inf)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median [2] of the first `count` values in each row of `values`, [2, HISTORY]."""
    ordered = jnp.sort(jnp.where(jnp.arange(HISTORY) < count, values, jnp.inf), axis=1)
    return (ordered[:, jnp.maximum(count - 1, 0) // 2] + ordered[:, count // 2 % HISTORY]) / 2


WINDOW = 1000
"""Number of steps for `resilience.max_skipped_share`."""


class SkippedSteps:
    """Record of a run's skipped steps (loss or gradient not finite, or a spike), kept in its checkpoints.

    Args:
      config: the limits.
      saved: `to_json` from the checkpoint that the run continues from.
    """

    def __init__(self, config: ResilienceConfig, saved: Mapping[str, Any] | None = None):
        self._config = config
        self.count: int = saved["count"] if saved else 0
        """Number of all skipped steps."""
        self._recent: list[int] = list(saved["recent"]) if saved else []
        self.unjoined: list[int] = []
        """Steps that were added since the last call of `join`."""

    def to_json(self) -> dict[str, Any]:
        """Return the record of skipped steps as plain JSON, for a checkpoint."""
        return {"count": self.count, "recent": self._recent}

    def add(self, step: int, in_a_row: int, values: Mapping[str, float], limits: Sequence[float]) -> str:
        """Count a skipped step, and return a message about it.

        Args:
          step: its number.
          in_a_row: number of skipped steps in a row, including this one.
          values: `loss` and `grad_norm` of the step.
          limits: the largest accepted values of these two.

        Returns:
          The message about this step.
        """
        self.count += 1
        self.unjoined.append(step)
        self._recent = [*(past for past in self._recent if past > step - WINDOW), step]
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        spiked = "at most {:.4g} and {:.4g}, by resilience.spike_threshold".format(*limits)
        return (
            f"step {step} was skipped: loss {values['loss']:.6g}, gradient norm {values['grad_norm']:.6g} "
            f"({spiked if finite else 'must be finite'}); {in_a_row} in a row"
        )

    def join(self, skipped: Iterable[Iterable[int]]) -> None:
        """Count the steps that other processes skipped as steps of this run too.

        So all processes have the same record, which is saved once, as that of several workers in one process is.

        Args:
          skipped: `unjoined` of each process, of this one too.
        """
        told = set[int]().union(*skipped)
        self.count += len(told.difference(self.unjoined))
        self.unjoined = []
        recent = told.union(self._recent)
        newest = max(recent, default=0)
        self._recent = sorted(step for step in recent if step > newest - WINDOW)

    def excess(self, step: int, in_a_row: int) -> tuple[int, str, str] | None:
        """Return (step to go back to, reason, advice) if too many steps were skipped, or None if no limit is exceeded.

        The step is the last one before the skipped steps; the reason names the limit.
        """
        most = self._config.max_skipped_steps
        share = self._config.max_skipped_share
        if in_a_row >= most:
            why = (
                f"{in_a_row} steps in a row had a loss or gradient that is not finite, or a spike "
                f"(resilience.max_skipped_steps is {most})"
            )
            good = step - in_a_row
        elif len(self._recent) > share * WINDOW:
            why = (
                f"{len(self._recent)} of the last {WINDOW} steps had a loss or gradient that is not finite, or a spike "
                f"(resilience.max_skipped_share is {share:g})"
            )
            good = self._recent[0] - 1
        else:
            return None
        return good, why, f"Lower the learning rate, or look at the data after step {good}."
