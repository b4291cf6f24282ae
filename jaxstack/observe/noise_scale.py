"""Estimates a run's gradient noise scale from its training steps (McCandlish et al. 2018, arXiv:1812.06162)."""

import math
from collections.abc import Mapping
from typing import Any

KEYS = ("noise_scale", "gradient_signal", "gradient_noise")
"""Keys of a metrics line."""
_MEMORY = 100
"""Number of steps that the running means remember: 1 / (1 - 0.99)."""


class NoiseScale:
    """Gradient noise scale of a run, as a batch size: the running mean of the noise S over that of the signal |G|².

    A single step's estimates are too noisy for a ratio, so each is averaged first: over all steps while there are few,
    exponentially with a factor of 0.99 later.

    Args:
      steps: number of steps before this start of the run.
      logged: the last logged values before it, from which the means continue.
    """

    def __init__(self, steps: int = 0, logged: Mapping[str, Any] | None = None):
        before = [(logged or {}).get(key) for key in KEYS[1:]]
        known = all(isinstance(value, int | float) and math.isfinite(value) for value in before)
        self._means = [float(value) for value in before if isinstance(value, int | float)] if known else [0.0, 0.0]
        self._steps = steps if known else 0

    def update(self, values: Mapping[str, float]) -> dict[str, float]:
        """Update the running means with a step's metrics; return the metrics with both means and `noise_scale`.

        Args:
          values: metrics of the next step; those without estimates are returned as they are.
        """
        new = [values[key] for key in KEYS[1:] if key in values]
        if len(new) < 2:
            return dict(values)
        if all(map(math.isfinite, new)):  # a skipped step may have none
            self._steps += 1
            share = 1 / min(self._steps, _MEMORY)
            self._means = [mean + share * (value - mean) for mean, value in zip(self._means, new, strict=True)]
        signal, noise = self._means
        ratio = {"noise_scale": noise / signal} if signal > 0 and noise >= 0 else {}
        return {**values, "gradient_signal": signal, "gradient_noise": noise, **ratio}


def noise_problem(microbatches: int, axes: Mapping[str, int]) -> str | None:
    """Return why this mesh or microbatch count cannot measure the noise scale, and what to change; None if it can.

    Args:
      microbatches: number of microbatches of a step.
      axes: mesh axis -> number of devices.
    """
    for axis in ("pipeline", "context"):
        if axes.get(axis, 1) > 1:
            return (
                f"observe.noise_scale does not support parallel.{axis}={axes[axis]}; set parallel.{axis}=1 or "
                "observe.noise_scale=false."
            )
    if microbatches < 2:
        return (
            "observe.noise_scale compares microbatches with the whole batch and needs train.gradient_accumulation of "
            f"at least 2; found {microbatches}; set it to 2 or observe.noise_scale=false."
        )
    return None
