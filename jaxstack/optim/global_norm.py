"""The global norm of a tree of arrays in few kernels, and clipping by it."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from pallas_kernels.target import automatic_axes

_FEWEST_ROWS, _MOST_ROWS = 256, 4096
"""Parts of an array that are summed in parallel."""
_SMALL = 2**16
"""Arrays with fewer elements are summed up together."""


def global_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Return the square root of the sum of all elements' squares, as `optax.tree.norm` does.

    A model has hundreds of small arrays, whose sums take two kernels each. Here small arrays, and partial sums of the
    large ones, are concatenated and summed up by one reduction. Arrays that XLA partitions are not: it would gather
    them first.
    """
    if automatic_axes() or not jax.tree.leaves(tree):
        return optax.tree.norm(tree)
    # The barrier prevents XLA from summing up each part of the concatenation by itself.
    parts = jax.lax.optimization_barrier(jnp.concatenate([_partial_sums(x) for x in jax.tree.leaves(tree)]))
    return jnp.sqrt(parts.sum())


def _partial_sums(x: jax.Array) -> jax.Array:
    """Return numbers [R] in float32 that add up to the sum of squares of all elements."""
    squares = jnp.square(jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
    if x.size < _SMALL:
        return squares.reshape(-1)
    rows = min(x.size & -x.size, _MOST_ROWS)
    return squares.reshape(rows, -1).sum(axis=1) if rows >= _FEWEST_ROWS else squares.sum(keepdims=True).reshape(1)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Return an Optax transformation that scales updates down to a global norm of `limit` if it is larger."""

    def update(updates: PyTree, params: PyTree = None) -> PyTree:
        norm = global_norm(updates)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit), updates)

    return optax.stateless(update)
