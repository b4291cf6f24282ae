"""Interface of the methods that synchronise the parameters of islands.

An island is a group of devices with its own copy of parameters and optimizer state. Functions of this package run
inside a `shard_map` that is manual over the mesh axis `islands`: trees of parameters are those of the island itself,
and collectives over the axis are the communication between islands. XLA partitions the axes inside of an island.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pydantic import Field

from jaxstack.config.base import Component

Dict = dict[str, Any]
"""Nested dicts whose leaves are arrays, or one value for each array, such as its shape."""


class OuterState(NamedTuple):
    """State of an island method besides the parameters: arrays equal on all islands, and arrays of each island."""

    shared: Dict
    """Arrays that are equal on all islands."""
    own: Dict
    """Arrays that each island has for itself."""


class Exchange(Protocol):
    """Interface of the communication between islands: when it takes place, and what it does to the parameters.

    A method may have several kinds of exchange, called phases, such as one for each part of the model. Each phase is
    compiled to a program of its own.
    """

    phases: int
    """Number of phases, which are counted from 0."""

    def init(self, params: Dict) -> OuterState:
        """Return the initial state for trained parameters that are equal on all islands."""
        ...

    def due(self, step: int) -> int | None:
        """Return the phase of the exchange that follows train step `step`, counted from 1; None if there is none."""
        ...

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the parameters and the state after an exchange of this phase."""
        ...


@runtime_checkable
class OverlappedExchange(Exchange, Protocol):
    """An exchange whose communication overlaps with the next train step.

    `send` and `merge` take the place of the call. `send` communicates the parameters from before that step while the
    step computes. `merge` runs `delay` steps after the step for which `due` returned the phase.
    """

    delay: int
    """Steps from `send` to `merge`, at least 1; with 1, `merge` follows the step that `send` overlaps with."""

    def send(self, phase: int, params: Dict, state: OuterState) -> OuterState:
        """Start an exchange during a step, from the parameters before that step; return the new state."""
        ...

    def merge(self, phase: int, params: Dict, state: OuterState) -> Dict:
        """Merge the result of `send` into the parameters, without communication."""
        ...


class IslandMethod(Component):
    """Base class of the methods that synchronise islands; each has a file and a `name`, and is listed in `METHODS`."""

    every: int = Field(default=30, ge=1)
    """Steps from one exchange of the parameters to the next."""
    synchronous_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run that are data-parallel over the islands: the gradients are summed in each of them,
    and exchanges begin afterwards (post-local SGD, Lin et al. 2020, arXiv:1808.07217)."""

    def problem(self, islands: int) -> str | None:
        """Return why the method cannot be used with this number of islands, and what helps; None if it can."""
        del islands
        return None

    @abstractmethod
    def build(self, islands: int, stacked: Mapping[str, Any]) -> Exchange:
        """Return the `Exchange` that implements the method for this number of islands.

        Args:
          islands: number of islands.
          stacked: True for each trained parameter whose first dim counts layers, in their structure.
        """
