"""Global norm of a tree of arrays, computed in few kernels, and clipping by it."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from pallas_kernels.target import automatic_axes

_FEWEST_ROWS = 256
_MOST_ROWS = 4096
"""Bounds of the number of partial sums of a large array, a power of two that divides its size."""
_SMALL = 2**16
"""Arrays with fewer elements are concatenated without partial sums."""


def global_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Return the square root of the sum of all elements' squares, as `optax.tree.norm` does.

    A model has hundreds of small arrays, and XLA launches two kernels for the sum of each. Here the squares of small
    arrays and partial sums of the large ones are concatenated and summed by one reduction, in float32. Under a mesh
    over which XLA partitions arrays this is `optax.tree.norm`: XLA would gather the arrays to concatenate them.
    """
    if automatic_axes() or not jax.tree.leaves(tree):
        return optax.tree.norm(tree)
    # Without the barrier XLA would sum each part of the concatenation in a kernel of its own.
    parts = jax.lax.optimization_barrier(jnp.concatenate([_partial_sums(x) for x in jax.tree.leaves(tree)]))
    return jnp.sqrt(parts.sum())


def _partial_sums(x: jax.Array) -> jax.Array:
    """Return float32 [R] whose sum is the sum of the squares of all elements."""
    squares = jnp.square(jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
    if x.size < _SMALL:
        return squares.reshape(-1)
    rows = min(x.size & -x.size, _MOST_ROWS)
    return squares.reshape(rows, -1).sum(axis=1) if rows >= _FEWEST_ROWS else squares.sum(keepdims=True).reshape(1)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Return an Optax transformation that scales updates down to a global norm of `limit` if theirs is larger."""

    def update(updates: PyTree, params: PyTree = None) -> PyTree:
        norm = global_norm(updates)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit), updates)

    return optax.stateless(update)
