"""Interface of methods that synchronise workers: groups of devices that each train a copy of the model.

A worker is a group of devices with its own copy of parameters and optimizer state. Functions of this package run
inside a `shard_map` that is manual over the mesh axis `workers`: trees of parameters are those of the worker itself,
and collectives over the axis are the communication between workers. XLA partitions the axes inside of a worker.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from pydantic import Field

from jaxstack.config.base import Component

Dict = dict[str, Any]
"""Nested dicts whose leaves are arrays, or one value for each array, such as its shape."""


class OuterState(NamedTuple):
    """State of a method that synchronises workers: arrays common to all, and arrays per worker."""

    shared: Dict
    """Arrays that are equal on all workers."""
    own: Dict
    """Arrays that each worker has for itself."""


class Exchange(Protocol):
    """Interface of a parameter exchange between workers: when and how it runs.

    A method may have several kinds of exchange, called phases, such as one for each part of the model. Each phase is
    compiled to a separate program.
    """

    phases: int
    """Number of phases, which are counted from 0."""

    def init(self, params: Dict) -> OuterState:
        """Return the method's initial state, given the parameters with which all workers start."""
        ...

    def due(self, step: int) -> int | None:
        """Return the phase (kind of exchange) that is due after step `step`, counted from 1; None if none is due."""
        ...

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Exchange parameters with other workers; return this worker's parameters and the new state."""
        ...


@runtime_checkable
class OverlappedExchange(Exchange, Protocol):
    """Interface of an exchange between workers that communicates while the next train step computes.

    `compute_changes`, `send` and `merge` take the place of the call. `compute_changes` runs before that step, `send`
    communicates its result while the step computes. `merge` runs `delay` steps after the step for which `due` returned
    the phase.
    """

    delay: int
    """Steps from `send` to `merge`, at least 1; with 1, `merge` follows the step that `send` overlaps with."""

    def compute_changes(self, phase: int, params: Dict, state: OuterState) -> dict[str, jax.Array]:
        """Return what `send` communicates, {name: array}; `params` are those that a train step starts from."""
        ...

    def send(self, phase: int, changes: dict[str, jax.Array], state: OuterState) -> OuterState:
        """Exchange the result of `compute_changes` between workers during a train step; return the new state."""
        ...

    def merge(self, phase: int, params: Dict, state: OuterState) -> Dict:
        """Return this worker's parameters, merged with the result of `send`; communicates nothing."""
        ...


class WorkerMethod(Component):
    """Base class of the methods that synchronise workers: one file each, all listed in `METHODS`."""

    every: int = Field(default=30, ge=1)
    """Steps from one exchange of the parameters to the next."""
    synchronous_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run that are data-parallel over the workers: the gradients are summed in each of them,
    and exchanges begin afterwards (post-local SGD, Lin et al. 2020, arXiv:1808.07217)."""

    def problem(self, workers: int) -> str | None:
        """Return why the method cannot be used with this number of workers, and a remedy; None if it can."""
        del workers
        return None

    @abstractmethod
    def build(self, workers: int, stacked: Mapping[str, Any]) -> Exchange:
        """Return the object that runs this method's parameter exchange between `workers` groups of devices.

        Args:
          workers: number of workers.
          stacked: True for each trained parameter whose first dim counts layers, in their structure.
        """
