"""Ways to average parameter changes over workers: exact, in 8 bits, or by low-rank factors."""

from typing import Protocol

import jax

from jaxstack.local_sgd.base import Dict, OuterState
from jaxstack.local_sgd.int8 import Int8Mean
from jaxstack.local_sgd.powersgd import PowerSGD
from jaxstack.parallel.config import WORKERS


class Reduction(Protocol):
    """Interface of methods that average arrays over workers; their state is passed in and out."""

    def init(self, tree: Dict) -> OuterState:
        """Return the initial state for averaging trees of arrays with the shapes of `tree`."""
        ...

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over workers, equal on all of them, and the updated state."""
        ...


class ExactMean:
    """Averages arrays over workers in their own dtype, by one all-reduce."""

    def init(self, tree: Dict) -> OuterState:
        """Return an empty state, as the exact mean needs none."""
        return OuterState({}, {})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over workers, and `state`, which it does not use."""
        return jax.lax.pmean(tree, WORKERS), state


def make_reduction(compression: str, rank: int, workers: int) -> Reduction:
    """Return the object that averages parameter changes over workers: exact, int8 or PowerSGD."""
    if compression == "powersgd":
        return PowerSGD(rank)
    return Int8Mean(workers) if compression == "int8" else ExactMean()
