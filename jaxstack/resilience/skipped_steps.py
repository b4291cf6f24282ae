"""Steps that were skipped: how many may be, in a row and among the last thousand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.resilience.config import ResilienceConfig

WINDOW = 1000
"""Steps over which `resilience.max_skipped_share` is taken."""


class SkippedSteps:
    """The skipped steps of a run, over all of its starts: `to_json` goes into each checkpoint.

    Args:
      config: its limits.
      saved: what `to_json` gave when the checkpoint was saved that the run goes on from.
    """

    def __init__(self, config: ResilienceConfig, saved: Mapping[str, Any] | None = None):
        self._config = config
        self.count: int = saved["count"] if saved else 0
        """All of them."""
        self._recent: list[int] = list(saved["recent"]) if saved else []

    def to_json(self) -> dict[str, Any]:
        """Plain JSON to go on from."""
        return {"count": self.count, "recent": self._recent}

    def add(self, step: int, in_a_row: int, values: Mapping[str, float], limits: Sequence[float]) -> str:
        """Counts a step; returns what is to be said of it.

        Args:
          values: `loss` and `grad_norm` of the step.
          limits: what these two may have been at most.
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
        """(the last step before the trouble, which limit is passed, what to do); None where none is."""
        most, share = self._config.max_skipped_steps, self._config.max_skipped_share
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
