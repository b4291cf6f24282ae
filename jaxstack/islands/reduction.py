"""Ways to average parameter changes over islands (device groups): exact, in 8 bits, or by low-rank factors."""

from typing import Protocol

import jax

from jaxstack.islands.base import Dict, OuterState
from jaxstack.islands.int8 import Int8Mean
from jaxstack.islands.powersgd import PowerSGD
from jaxstack.parallel.config import ISLANDS


class Reduction(Protocol):
    """Interface of methods that average arrays over islands (device groups); their state is passed in and out."""

    def init(self, tree: Dict) -> OuterState:
        """Return the initial state for averaging trees of arrays with the shapes of `tree`."""
        ...

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over islands (device groups), equal on all of them, and the updated state."""
        ...


class ExactMean:
    """Averages arrays over islands (device groups) in their own dtype, by one all-reduce."""

    def init(self, tree: Dict) -> OuterState:
        """Return an empty state, as the exact mean needs none."""
        return OuterState({}, {})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over islands (device groups), and `state`, which it does not use."""
        return jax.lax.pmean(tree, ISLANDS), state


def make_reduction(compression: str, rank: int, islands: int) -> Reduction:
    """Return the object that averages parameter changes over islands (device groups): exact, int8 or PowerSGD."""
    if compression == "powersgd":
        return PowerSGD(rank)
    return Int8Mean(islands) if compression == "int8" else ExactMean()
