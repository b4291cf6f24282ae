"""Interface of the methods that keep islands together.

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
"""Nested dicts with arrays, or something for each array, as leaves."""


class OuterState(NamedTuple):
    """State of a method, in addition to the islands' parameters. Both are {} for a method without state."""

    shared: Dict
    """Arrays that are equal on all islands."""
    own: Dict
    """Arrays that each island has for itself."""


class Exchange(Protocol):
    """Communication of a method, for one run. Exchanges take turns in `phases` kinds, each a program of its own."""

    phases: int
    """Number of kinds of exchange."""

    def init(self, params: Dict) -> OuterState:
        """Return the state at the start of a run, from the trained parameters, which are equal on all islands."""
        ...

    def due(self, step: int) -> int | None:
        """Return the phase of the exchange that follows this step, counted from 1; None: there is none."""
        ...

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the parameters and the state after an exchange."""
        ...


@runtime_checkable
class OverlappedExchange(Exchange, Protocol):
    """An exchange whose communication runs beside the next step, on the parameters before it.

    `send` and `merge` in place of a call; `merge` follows `delay` steps after the step that the exchange is due at.
    """

    delay: int
    """Number of steps, at least 1."""

    def send(self, phase: int, params: Dict, state: OuterState) -> OuterState:
        """Return the state after the communication, from the parameters before the step that runs beside it."""
        ...

    def merge(self, phase: int, params: Dict, state: OuterState) -> Dict:
        """Return the parameters after the result has arrived. Communicates nothing."""
        ...


class IslandMethod(Component):
    """Base class of methods. A subclass has its own file and a `name`, and is listed in `METHODS`."""

    every: int = Field(default=30, ge=1)
    """Steps from one exchange of the parameters to the next."""

    def problem(self, islands: int) -> str | None:
        """Return why the method cannot be used with this number of islands, and a way out; None if it can."""
        del islands
        return None

    @abstractmethod
    def build(self, islands: int, stacked: Mapping[str, Any]) -> Exchange:
        """Return the method's communication.

        Args:
          islands: number of islands.
          stacked: True for each trained parameter whose first dim counts layers, in their structure.
        """
