"""Counts training steps that were skipped for a bad loss or gradient: in a row, and of the last thousand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.resilience.config import ResilienceConfig

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
        self._recent = [*(past for past in self._recent if past > step - WINDOW), step]
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        spiked = "at most {:.4g} and {:.4g}, by resilience.spike_threshold".format(*limits)
        return (
            f"step {step} was skipped: loss {values['loss']:.6g}, gradient norm {values['grad_norm']:.6g} "
            f"({spiked if finite else 'must be finite'}); {in_a_row} in a row"
        )

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
