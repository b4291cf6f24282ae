"""Merges dense layers that read the same input (query, key, value; gate, up) into one, for faster decoding.

A decoding step reads each weight once, and each matmul takes a few microseconds besides, whatever its size. One matmul
for queries, keys and values, and one for the gate and the input of an MLP, take that time once.
"""

from collections.abc import Collection

import jax
from flax import nnx

from jaxstack.models.attention_layer import Attention
from jaxstack.models.mlp import GatedMLP

ModulePath = tuple[object, ...]
"""Names of attributes and indices that lead to a submodule."""


def join_projections(model: nnx.Module, paths: Collection[ModulePath] | None = None) -> frozenset[ModulePath]:
    """Merge query, key and value projections, and gate and up projections, into one dense layer each, in place.

    Args:
      model: a Transformer.
      paths: the submodules to change, as an earlier call returned them; None: all.

    Returns:
      The paths of the submodules that were changed.
    """
    joined = []
    for path, module in list(nnx.iter_modules(model)):
        if not isinstance(module, Attention | GatedMLP) or (paths is not None and path not in paths):
            continue
        if module.join_projections():
            jax.block_until_ready(nnx.state(module))  # The separate matrices are freed before the next are joined.
            joined.append(path)
    return frozenset(joined)
