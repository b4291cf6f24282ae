"""Preparation of layers' weights for use: all-gather, cast, and the logical axes of stacked layers."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx

from jaxstack.parallel import gather_parameter

Weights: TypeAlias = Any
"""An NNX state: a tree of `nnx.Variable`, of one layer or of a stack of layers."""


def gather_weights(state: Weights, dtype: jax.typing.DTypeLike) -> Weights:
    """All-gather a layer's parameters over the mesh axis `fsdp`, and cast matrices to `dtype`."""

    def gather(p: nnx.Variable) -> nnx.Variable:
        if not isinstance(p, nnx.Param):
            return p
        matmul = p.get_metadata().get("matmul")
        return p.replace(gather_parameter(p, dtype) if matmul is None else matmul.gather(p, dtype))

    return jax.tree.map(gather, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def gather_layers(states: Sequence[Weights], dtype: jax.typing.DTypeLike) -> list[Weights]:
    """All-gather and cast the weights of layers that a scan has sliced out of stacked arrays."""
    return [gather_weights(remove_layers_logical_axis(state), dtype) for state in states]


def add_layers_logical_axis(state: Weights) -> Weights:
    """Add the logical axis `layers` to the metadata of variables whose arrays have been stacked."""

    def relabel(p):
        return p.copy(logical_axes=("layers", *p.get_metadata()["logical_axes"]))

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def remove_layers_logical_axis(state: Weights) -> Weights:
    """Remove the logical axis `layers` from the metadata of variables whose arrays have been sliced."""

    def relabel(p: nnx.Variable) -> nnx.Variable:
        known = p.get_metadata()
        return p.copy(**{name: known[name][1:] for name in ("logical_axes", "whole_shape") if name in known})

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
