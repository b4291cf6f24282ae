"""Gossip: each worker averages parameters with a few neighbours at a time."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from jaxstack.local_sgd.base import Dict, OuterState, WorkerMethod
from jaxstack.parallel.config import WORKERS

Weights = tuple[tuple[int, float], ...]
"""Pairs (shift, weight): worker i adds weight times the parameters of worker i + shift."""


class Gossip(WorkerMethod):
    """Gossip (Lian et al. 2017, arXiv:1705.09056): each worker averages its parameters with a few others."""

    name: Literal["gossip"] = "gossip"
    graph: Literal["ring", "exponential"] = "exponential"
    """exponential: with one worker at a time, 1, 2, 4... places further on (Assran et al. 2019, arXiv:1811.10792),
    which gives the exact mean after log2(workers) exchanges; ring: with both neighbours."""

    def problem(self, workers: int) -> str | None:
        if self.graph == "exponential" and workers & (workers - 1):
            below = 1 << (workers.bit_length() - 1)
            return (
                f"local_sgd.graph=exponential needs a power of two of parallel.workers; found {workers}; nearest: "
                f"{below} or {2 * below}; or set local_sgd.graph=ring."
            )
        return None

    def build(self, workers: int, stacked: Mapping[str, Any]) -> "GossipExchange":
        return GossipExchange(self.every, workers, mixing_weights(self.graph, workers))


def mixing_weights(graph: str, workers: int) -> list[Weights]:
    """Return the weights of the averages in gossip: for each exchange of a cycle, pairs (shift, weight).

    In the average of worker i the parameters of group i + shift have this weight.
    """
    if graph == "ring":
        return [((0, 1 / 3), (1, 1 / 3), (-1, 1 / 3)) if workers > 2 else ((0, 0.5), (1, 0.5))]
    return [((0, 0.5), (1 << turn, 0.5)) for turn in range(workers.bit_length() - 1)]


class GossipExchange:
    """Gossip averaging between workers: one collective permute of the parameters per neighbour.

    Args:
      every: steps between two exchanges.
      workers: number of workers.
      weights: of each phase, from `mixing_weights`; the phases take turns.
    """

    def __init__(self, every: int, workers: int, weights: list[Weights]):
        self._every = every
        self._workers = workers
        self._weights = weights
        self.phases = len(weights)

    def init(self, params: Dict) -> OuterState:
        """Return an empty state, as gossip needs none."""
        return OuterState({}, {})

    def due(self, step: int) -> int | None:
        """Return which phase of the graph (set of neighbours) to average over after this step; None if none is due."""
        return None if step % self._every else (step // self._every - 1) % self.phases

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Replace a worker's parameters by the weighted mean of its own and those of its neighbours."""

        def mix(x: jax.Array) -> jax.Array:
            return sum(
                (weight * self._from(x, shift) for shift, weight in self._weights[phase][1:]),
                self._weights[phase][0][1] * x,
            )

        return jax.tree.map(mix, params), state

    def _from(self, x: jax.Array, shift: int) -> jax.Array:
        """Return array x of worker i + `shift`, where i is this group's index in the ring of groups (workers)."""
        pairs = [(source, (source - shift) % self._workers) for source in range(self._workers)]
        return jax.lax.ppermute(x, WORKERS, pairs)
