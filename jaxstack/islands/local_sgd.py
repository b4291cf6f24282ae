"""Local SGD (Stich 2019, arXiv:1805.09767): device groups train separately, and average parameters now and then."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from jaxstack.islands.base import Dict, IslandMethod, OuterState
from jaxstack.parallel.config import ISLANDS


class LocalSGD(IslandMethod):
    """Local SGD: replaces the parameters by their mean over islands every `every` steps, without extra state."""

    name: Literal["local_sgd"] = "local_sgd"

    def build(self, islands: int, stacked: Mapping[str, Any]) -> "MeanExchange":
        return MeanExchange(self.every)


class MeanExchange:
    """Local SGD's parameter exchange: one all-reduce, which averages the parameters over islands (device groups).

    Args:
      every: steps between two exchanges.
    """

    phases = 1

    def __init__(self, every: int):
        self._every = every

    def init(self, params: Dict) -> OuterState:
        """Return an empty state, as local SGD needs none."""
        return OuterState({}, {})

    def due(self, step: int) -> int | None:
        """Return 0 (the number of the only exchange phase) if an exchange is due after this step, otherwise None."""
        return None if step % self._every else 0

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Replace the parameters of an island (device group) by their mean over all islands."""
        return jax.lax.pmean(params, ISLANDS), state
