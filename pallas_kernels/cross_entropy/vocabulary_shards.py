"""Helpers for a vocabulary that is sharded evenly over an axis of a surrounding `jax.shard_map`.

The backends return each device's share of the loss there: the shares sum to the loss. So the gradient of every share
is 1, and JAX's own `psum` of the shares carries the cotangents, with and without `check_vma`.
"""

from typing import Any

import jax


def axis_size(axis_name: str | None) -> int:
    """Return how many devices the vocabulary is sharded over: the size of the mesh axis, or 1 if there is none.

    Raises:
        ValueError: no surrounding shard_map has this axis.
    """
    if axis_name is None:
        return 1
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        known = ", ".join(repr(name) for name in jax.sharding.get_abstract_mesh().manual_axes) or "none"
        raise ValueError(
            f"axis_name must be an axis of a surrounding jax.shard_map; got {axis_name!r}, axes here: {known}; "
            "leave axis_name out outside of shard_map"
        ) from None


def first_vocabulary_id(axis_name: str | None, vocabulary: int) -> int | jax.Array:
    """Return the id of the first entry in this device's vocabulary shard; each shard has `vocabulary` entries."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * vocabulary


def mask_to_first_device(axis_name: str | None, x: jax.Array) -> jax.Array:
    """Return `x` on the first device of the axis and 0 on the others, so that a sum over devices counts it once."""
    return x if axis_name is None else jax.numpy.where(jax.lax.axis_index(axis_name) == 0, x, 0)


def match_varying_axes(axis_name: str | None, *arrays: jax.Array | None) -> list[Any]:
    """Mark arrays as varying over the same mesh axes (`jax.lax.pcast`), for the replication check of `jax.shard_map`.

    With `check_vma` JAX then sums a gradient over the axes along which its array is replicated, and a loop's carry
    keeps its type. Without `check_vma`, and outside of shard_map, the arrays are returned as they are.
    """
    tracked = set().union(*(_varying(x) for x in arrays if x is not None))
    if not tracked:
        return list(arrays)
    wanted = tracked | ({axis_name} if axis_name else set())

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [None if x is None else mark(x) for x in arrays]


def _varying(x: jax.Array) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))
