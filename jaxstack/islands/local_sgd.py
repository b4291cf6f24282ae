"""Local SGD (Stich 2019, arXiv:1805.09767): the islands' parameters are replaced by their mean."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from pydantic import Field

from jaxstack.islands.base import Dict, IslandMethod, OuterState
from jaxstack.parallel.config import ISLANDS


class LocalSGD(IslandMethod):
    """Replaces the parameters by their mean every `every` steps, without any further state."""

    name: Literal["local_sgd"] = "local_sgd"
    synchronous_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run that are each followed by a mean of the parameters, while they change quickly (Lin
    et al. 2020, arXiv:1808.07217)."""

    def build(self, islands: int, stacked: Mapping[str, Any]) -> "MeanExchange":
        return MeanExchange(self.every, self.synchronous_steps)


class MeanExchange:
    """The exchange of local SGD: one all-reduce of the parameters.

    Args:
      every: steps between two exchanges.
      synchronous_steps: steps at the start that are each followed by one.
    """

    phases = 1

    def __init__(self, every: int, synchronous_steps: int = 0):
        self._every, self._synchronous_steps = every, synchronous_steps

    def init(self, params: Dict) -> OuterState:
        """Return no state."""
        return OuterState({}, {})

    def due(self, step: int) -> int | None:
        """Return phase 0 if an exchange follows this step, otherwise None."""
        return 0 if step <= self._synchronous_steps or step % self._every == 0 else None

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of the islands' parameters."""
        return jax.lax.pmean(params, ISLANDS), state
