"""Local SGD (Stich 2019, arXiv:1805.09767): workers train separately, and average parameters now and then."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from jaxstack.local_sgd.base import Dict, OuterState, WorkerMethod
from jaxstack.parallel.config import WORKERS


class LocalSGD(WorkerMethod):
    """Local SGD: replaces the parameters by their mean over workers every `every` steps, without extra state."""

    name: Literal["local_sgd"] = "local_sgd"

    def build(self, workers: int, stacked: Mapping[str, Any]) -> "MeanExchange":
        return MeanExchange(self.every)


class MeanExchange:
    """Local SGD's parameter exchange: one all-reduce, which averages the parameters over workers.

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
        """Replace the parameters of a worker by their mean over all workers."""
        return jax.lax.pmean(params, WORKERS), state
