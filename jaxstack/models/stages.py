"""A Transformer cut for a pipeline: what comes before its stacked layers, one repetition of them, and what comes after.

The ends run the user's own loss function on the model with a stand-in where the stacked layers are: it hands out what
reached it, or takes up a given residual stream.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.attention.layer import Context
from jaxstack.models.remat import rematerialise
from jaxstack.models.stack import Caches, Stack, add_losses, gather_layers
from jaxstack.models.transformer import Transformer

RunLoss = Callable[[Transformer], Any]
"""Runs the loss of a microbatch on a model."""


class LayerInputs(NamedTuple):
    """What all layers of a microbatch share."""

    context: Context
    key: jax.Array | None


def is_stacked(path: Any, variable: Any) -> bool:
    """An NNX filter: the parameters of the stacked layers."""
    axes = variable.get_metadata().get("logical_axes") if isinstance(variable, nnx.Variable) else None
    return bool(axes) and axes[0] == "layers"


class _Reached(Exception):
    def __init__(self, x: jax.Array, loss: jax.Array | None, inputs: LayerInputs):
        super().__init__()
        self.x, self.loss, self.inputs = x, loss, inputs


class _Outlet(nnx.Module):
    """In the layers' place: stops, with what reached the stacked ones of `stack`, or all without it."""

    def __init__(self, stack: Stack | None = None):
        self.stack = stack

    def __call__(self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any) -> Any:
        losses: list[Any] = []
        if self.stack is not None:
            x, _, losses = self.stack.leading(x, context, caches, key, dtype)
        raise _Reached(x, add_losses(losses), LayerInputs(context, key))


class _Inlet(nnx.Module):
    """In the layers' place: goes on with what came out of the stacked ones."""

    def __init__(self, stack: Stack, x: jax.Array):
        self.stack, self.x = stack, nnx.data(x)

    def __call__(self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any) -> Any:
        return self.stack.remainder(self.x, context, caches, key, dtype, ([], []))


class _NoLookup(nnx.Module):
    """In the embedding's place where nobody reads what it finds; the head may still be tied to its table."""

    def __init__(self, table: nnx.Param, size: int):
        self.table, self.size = table, size

    def __call__(self, ids: jax.Array, dtype: Any) -> jax.Array:
        return jnp.zeros((*ids.shape, self.size), dtype)


def _no_lookup(model: Transformer) -> _NoLookup:
    return _NoLookup(model.embedding.table, model.config.hidden_size)


def _replace(model: Transformer, **parts: Any) -> None:
    for name, part in parts.items():
        setattr(model, name, part)


def inputs_of_layers(model: Transformer, run: RunLoss) -> tuple[jax.Array, jax.Array | None]:
    """(the residual stream that enters the stacked layers, router losses of those before) of `run` on the model."""
    reached = _reach(model, run, _Outlet(model.decoder))
    return reached.x, reached.loss


def _reach(model: Transformer, run: RunLoss, outlet: _Outlet) -> _Reached:
    _replace(model, decoder=outlet)
    try:
        run(model)
    except _Reached as reached:
        return reached
    raise TypeError("the loss function never ran the layers of the model.")


def shared_inputs(model: Transformer, run: RunLoss) -> LayerInputs:
    """What the layers share when `run` is run on the model; nothing is embedded."""
    _replace(model, embedding=_no_lookup(model), position_embedding=None)
    return _reach(model, run, _Outlet()).inputs


def loss_of_outputs(model: Transformer, run: RunLoss, x: jax.Array) -> Any:
    """The result of `run` for a residual stream x [B, T, D] that leaves the stacked layers."""
    _replace(model, decoder=_Inlet(model.decoder, x), embedding=_no_lookup(model), position_embedding=None)
    return run(model)


def repetition(model: Transformer) -> Callable[[Any, jax.Array, LayerInputs, jax.Array], tuple[jax.Array, Any]]:
    """One repetition of the stacked layers: (their parameters, x, shared inputs, its index) -> (x, loss of its own).

    The parameters are an NNX state of those that `is_stacked` selects, without the dim of the layers.
    """
    stack, dtype = model.decoder, model.dtype

    def run(weights: Any, x: jax.Array, inputs: LayerInputs, index: jax.Array) -> tuple[jax.Array, Any]:
        whole = gather_layers([weights["decoder"]["layers"][i] for i in stack.scanned], dtype)
        x, (_, losses) = stack.repetition(x, whole, inputs.context, None, inputs.key, index)
        return x, add_losses(losses)

    return rematerialise(run, stack.remat, scanned=True)
