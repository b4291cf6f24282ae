"""Weights of a compressed model as they are stored, with their sizes and errors for the report."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.checkpoint.compressed import dense_parameter, stored_bytes
from jaxstack.compress.after_training.report import WeightRow
from jaxstack.compress.base import AfterTraining, method_name
from jaxstack.compress.config import Recipe
from jaxstack.compress.formats.block_float import SharedExponents
from jaxstack.compress.matrix import MatrixLayout
from pallas_kernels import Grid, PackedWeight


def describe_weight(
    path: str,
    method: AfterTraining | None,
    layout: MatrixLayout,
    before: jax.Array,
    after: PackedWeight | jax.Array,
    output_error: float | None,
) -> WeightRow:
    """Return the size and the error of one weight.

    Args:
      path: its path in the model.
      method: the method that compressed it; None: none.
      layout: the weight as a matrix.
      before: its values, float32.
      after: the weight as it is stored.
      output_error: relative squared error of the layer's output, if it was measured.
    """
    dense = dense_parameter(path, after).astype(jnp.float32)
    wide = before.astype(jnp.float32)
    difference = dense - wide
    return WeightRow(
        path=path,
        layer=layer_name(path),
        method="keep" if method is None else method_name(method),
        shape=(*layout.stack_shape, *layout.size),
        bytes_before=2 * before.size,
        bytes_after=stored_bytes(after),
        error=float(jnp.sum(difference**2) / jnp.maximum(jnp.sum(wide**2), jnp.finfo(jnp.float32).tiny)),
        zeros=float(jnp.mean(dense == 0)),
        output_error=output_error,
    )


def layer_name(path: str) -> str:
    """Return the layer that a weight belongs to, as reports name it: a number, `embedding` or `head`."""
    parts = path.split("/")
    return parts[2] if parts[:2] == ["decoder", "layers"] else parts[0]


def as_stored(leaf: Any, recipe: Recipe) -> Any:
    """Convert a parameter to the recipe's storage format; of a packed one only the values that it holds as they are."""
    if isinstance(leaf, PackedWeight):
        return leaf.with_numbers(recipe.store)
    if leaf.ndim == 0:
        return leaf
    if leaf.ndim > 1:
        return leaf.astype(recipe.store)
    if recipe.vectors == "float32":
        return leaf
    row = MatrixLayout(leaf.shape, stack=0, inputs=1)
    blocks = SharedExponents(Grid(8, math.gcd(64, leaf.size)))
    return row.from_compressed(blocks.pack(row.to_matrices(leaf)))
