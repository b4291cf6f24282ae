"""Means over islands of their parameter changes, exact or compressed."""

from typing import Protocol

import jax

from jaxstack.islands.base import Dict, OuterState
from jaxstack.islands.int8 import Int8Mean
from jaxstack.islands.powersgd import PowerSGD
from jaxstack.parallel.config import ISLANDS


class Reduction(Protocol):
    """Interface of a mean over islands, exact or compressed, which may keep state such as an error feedback."""

    def init(self, tree: Dict) -> OuterState:
        """Return the initial state of the reduction for trees of arrays with these shapes."""
        ...

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean, equal on all islands, and the state with its entries updated."""
        ...


class ExactMean:
    """The mean in the arrays' own dtype: one all-reduce."""

    def init(self, tree: Dict) -> OuterState:
        """Return no state."""
        return OuterState({}, {})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean and the state as it is."""
        return jax.lax.pmean(tree, ISLANDS), state


def make_reduction(compression: str, rank: int, islands: int) -> Reduction:
    """Return the reduction named `compression`: none, int8 or powersgd (with this rank)."""
    if compression == "powersgd":
        return PowerSGD(rank)
    return Int8Mean(islands) if compression == "int8" else ExactMean()
