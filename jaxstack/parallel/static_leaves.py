"""Splits trees into their arrays and their static values, such as booleans that layers branch on.

Functions that trace all their arguments, such as `jax.checkpoint` and `jax.shard_map`, get the arrays alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree


def split_arrays(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the arrays of a tree, and a function that makes the tree of other arrays in their places."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def join(arrays: Sequence[Any]) -> PyTree:
        rest = iter(arrays)
        return structure.unflatten(
            [next(rest) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        )

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], join
