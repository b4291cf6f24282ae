"""Local SGD (Stich 2019, arXiv:1805.09767): the islands' parameters are replaced by their mean."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from jaxstack.islands.base import Dict, IslandMethod, OuterState
from jaxstack.parallel.config import ISLANDS


class LocalSGD(IslandMethod):
    """Replaces the parameters by their mean every `every` steps, without any further state."""

    name: Literal["local_sgd"] = "local_sgd"

    def build(self, islands: int, stacked: Mapping[str, Any]) -> "MeanExchange":
        return MeanExchange(self.every)


class MeanExchange:
    """The exchange of local SGD: one all-reduce of the parameters.

    Args:
      every: steps between two exchanges.
    """

    phases = 1

    def __init__(self, every: int):
        self._every = every

    def init(self, params: Dict) -> OuterState:
        """Return no state."""
        return OuterState({}, {})

    def due(self, step: int) -> int | None:
        """Return phase 0 if an exchange follows this step, otherwise None."""
        return None if step % self._every else 0

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of the islands' parameters."""
        return jax.lax.pmean(params, ISLANDS), state
