"""Weights of layers: gathered and cast for use, and the labels of stacked ones."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx

from jaxstack.parallel import gather_parameter

Weights: TypeAlias = Any
"""An NNX state: a tree of `nnx.Variable`, of one layer or of a stack of layers."""


def gather_weights(state: Weights, dtype: jax.typing.DTypeLike) -> Weights:
    """Gather every parameter of a state over `fsdp`, and cast it to `dtype` (vectors stay float32)."""

    def gather(p: nnx.Variable) -> nnx.Variable:
        if not isinstance(p, nnx.Param):
            return p
        matmul = p.get_metadata().get("matmul")
        return p.replace(gather_parameter(p, dtype) if matmul is None else matmul.gather(p, dtype))

    return jax.tree.map(gather, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def gather_layers(states: Sequence[Weights], dtype: jax.typing.DTypeLike) -> list[Weights]:
    """Gather and cast the weights of single layers that were indexed out of stacked arrays."""
    return [gather_weights(remove_layers_logical_axis(state), dtype) for state in states]


def add_layers_logical_axis(state: Weights) -> Weights:
    """Add the leading dim of layers to the logical axes of variables whose arrays have it."""
    relabel = lambda p: p.copy(logical_axes=("layers", *p.get_metadata()["logical_axes"]))  # noqa: E731
    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def remove_layers_logical_axis(state: Weights) -> Weights:
    """Remove the dim of layers from the metadata of variables whose arrays no longer have it."""

    def relabel(p: nnx.Variable) -> nnx.Variable:
        known = p.get_metadata()
        return p.copy(**{name: known[name][1:] for name in ("logical_axes", "whole_shape") if name in known})

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
