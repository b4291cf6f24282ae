"""A vocabulary in equal parts on the devices of an axis of a surrounding `jax.shard_map`, and what follows for types.

What the backends return there is each device's share of the loss: the shares sum to the loss. So the gradient of
every share is 1, and JAX's own `psum` of the shares carries the cotangents, with and without `check_vma`.
"""

from typing import Any

import jax


def axis_size(axis_name: str | None) -> int:
    """Number of devices along the axis; 1 without an axis.

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
            "outside of shard_map leave axis_name out"
        ) from None


def first_id(axis_name: str | None, vocabulary: int) -> Any:
    """The vocabulary's entry that this device's part of `vocabulary` entries begins with."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * vocabulary


def on_first_device(axis_name: str | None, x: jax.Array) -> jax.Array:
    """`x` on the first device of the axis and 0 on the others: something that is to be counted once."""
    return x if axis_name is None else jax.numpy.where(jax.lax.axis_index(axis_name) == 0, x, 0)


def match_varying_axes(axis_name: str | None, *arrays: Any) -> list[Any]:
    """The arrays, each marked as varying over every mesh axis that one of them, or the vocabulary, varies over.

    Under `check_vma` JAX then sums a gradient over the axes along which its array is the same everywhere, and a
    loop's carry keeps its type. Without `check_vma`, and outside of shard_map, this does nothing.
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
