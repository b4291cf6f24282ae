"""Averages parameter changes over workers: exactly, in 8 bits (both ways), or by low-rank factors (PowerSGD).

Dims: m x n a matrix; leading dims, such as layers and experts, are those of a batch of matrices; r the rank.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxstack.local_sgd.base import Dict, OuterState
from jaxstack.optim.base import KNOWN, MatrixShapeRule, is_matrix
from jaxstack.parallel.config import WORKERS
from jaxstack.parameter_paths import flatten, match, nest

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


class MatrixShape(NamedTuple):
    """Shape of a parameter viewed as a batch of matrices, for low-rank compression."""

    batch: tuple[int, ...]
    rows: int
    columns: int

    @property
    def full(self) -> tuple[int, ...]:
        """The full shape [*batch, m, n]."""
        return (*self.batch, self.rows, self.columns)

    def pays(self, rank: int) -> bool:
        """Return True if compression to this rank saves communication: the factors are smaller than the matrix."""
        return rank * (self.rows + self.columns) < self.rows * self.columns


class PowerSGD:
    """Averages matrices over workers by exchanging low-rank factors P [m, r] and Q [n, r], with error feedback.

    PowerSGD: Vogels et al. 2019, arXiv:1905.13727.

    Each worker adds to its matrix what the factors left out last time (`error`). An exchange starts from the
    Q of the last one (`factors`). Vectors, and matrices that are not larger than their factors, are averaged exactly.

    Args:
      rank: r.
    """

    def __init__(self, rank: int):
        self._rank = rank

    def init(self, tree: Dict) -> OuterState:
        """Return the initial state: per compressed parameter a random Q, equal in all workers, and zero error."""
        factors = {}
        errors = {}
        for path, x in flatten(tree).items():
            shape = self.matrix_shape("/".join(path), x)
            if shape is not None:
                key = jax.random.fold_in(jax.random.key(0), len(factors))
                factors[path] = jax.random.normal(key, (*shape.batch, shape.columns, self._rank))
                errors[path] = jnp.zeros_like(x)
        return OuterState({"factors": nest(factors.items())}, {"error": nest(errors.items())})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Return the mean of a tree over workers, and the state with new factors and errors."""
        factors = flatten(state.shared["factors"])
        errors = flatten(state.own["error"])
        means = flatten(tree)
        for path, x in means.items():
            shape = self.matrix_shape("/".join(path), x)
            if shape is None:
                means[path] = jax.lax.pmean(x, WORKERS)
                continue
            mean, factors[path], error = low_rank_mean((x + errors[path]).reshape(shape.full), factors[path])
            means[path] = mean.reshape(x.shape)
            errors[path] = error.reshape(x.shape)
        shared = {"factors": nest(factors.items())}
        own = {"error": nest(errors.items())}
        return nest(means.items()), OuterState({**state.shared, **shared}, {**state.own, **own})

    def matrix_shape(self, path: str, leaf: jax.Array) -> MatrixShape | None:
        """Return the shape of a parameter viewed as matrices; None if it is averaged without compression."""
        rule: MatrixShapeRule = match(path, [(rule.path, rule) for rule in KNOWN])
        if not is_matrix(path, leaf) or leaf.ndim < rule.inputs + rule.outputs:
            return None
        sides = leaf.ndim - rule.outputs
        rows = leaf.shape[sides - rule.inputs : sides]
        columns = leaf.shape[sides:]
        shape = MatrixShape(leaf.shape[: sides - rule.inputs], math.prod(rows), math.prod(columns))
        return shape if shape.pays(self._rank) else None


def low_rank_mean(own: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Average matrices over workers by low-rank factors; return mean, next factor, and this group's error.

    Args:
      own: this worker's matrices [..., m, n].
      factor: Q of the last exchange [..., n, r], equal on all workers.
    """
    left = orthonormal(jax.lax.pmean(own @ factor, WORKERS))
    right = jnp.swapaxes(own, -1, -2) @ left
    factor = jax.lax.pmean(right, WORKERS)

    def back(right):
        return left @ jnp.swapaxes(right, -1, -2)

    return back(factor), factor, own - back(right)


def orthonormal(x: jax.Array) -> jax.Array:
    """Return an orthonormal basis of the columns of x [..., m, r] by QR, with zero columns where r exceeds m."""
    flat = x.reshape(-1, *x.shape[-2:])
    # One at a time: a batched QR of large matrices takes many times as long on GPUs.
    columns = jax.lax.map(lambda matrix: jnp.linalg.qr(matrix)[0], flat)
    missing = x.shape[-1] - columns.shape[-1]
    return jnp.pad(columns, ((0, 0), (0, 0), (0, missing))).reshape(x.shape)


def make_reduction(compression: str, rank: int, workers: int) -> Reduction:
    """Return the object that averages parameter changes over workers: exact, int8 or PowerSGD."""
    if compression == "powersgd":
        return PowerSGD(rank)
    return Int8Mean(workers) if compression == "int8" else ExactMean()
