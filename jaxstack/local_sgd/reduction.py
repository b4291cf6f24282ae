"""Averages parameter changes over workers: exactly, in 8 bits (both ways), or by low-rank factors."""

from typing import Protocol

import jax
import jax.numpy as jnp

from jaxstack.local_sgd.base import Dict, OuterState
from jaxstack.local_sgd.powersgd import PowerSGD
from jaxstack.parallel.config import WORKERS

_LARGEST = 127
"""Largest magnitude of a quantized value."""


class Int8Mean:
    """Averages arrays over any number of workers, sending each value only twice, in int8.

    An array is cut along its longest dim, except for the last one, that the number of workers divides; each worker
    averages one piece of it. A row (along the last dim) has one float32 scale, so that a value is rounded by at most
    1/254 of the largest of its row, once on each way. Vectors, and arrays that cannot be cut, are averaged in float32.

    Args:
      workers: number of workers.
    """

    def __init__(self, workers: int):
        self._workers = workers

    def init(self, tree: Dict) -> OuterState:
        """Return an empty state, as this mean needs none."""
        return OuterState({}, {})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over workers, sent as int8, and `state`, which it does not use."""
        return jax.tree.map(self._mean, tree), state

    def _mean(self, x: jax.Array) -> jax.Array:
        dim = self.cut(x.shape)
        if dim is None:
            return jax.lax.pmean(x, WORKERS)
        pieces = jnp.stack(jnp.split(x, self._workers, axis=dim))
        # Piece i of every worker travels to worker i.
        received = [jax.lax.all_to_all(part, WORKERS, 0, 0) for part in quantize(pieces)]
        mean = jnp.mean(dequantize(*received), axis=0)
        gathered = dequantize(*(jax.lax.all_gather(part, WORKERS) for part in quantize(mean)))
        return jnp.concatenate(list(gathered), axis=dim)

    def cut(self, shape: tuple[int, ...]) -> int | None:
        """Choose the dim along which to split an array over workers; None if none fits (it is not quantized)."""
        # The last dim is that of the scales; the pieces' rows stay whole.
        dims = [d for d in range(len(shape) - 1) if shape[d] % self._workers == 0 and shape[d]]
        return max(dims, key=lambda d: shape[d], default=None)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantize x to int8 with a float32 scale for each row (last dim); return the values, and the scales [..., 1]."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / _LARGEST
    values = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    return jnp.clip(values, -_LARGEST, _LARGEST).astype(jnp.int8), scale


def dequantize(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Convert int8 values and row scales back to float32: the inverse of `quantize`."""
    return values.astype(jnp.float32) * scale


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
