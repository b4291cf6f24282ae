"""Splits a Transformer for pipeline parallelism: all before the layer scan, one iteration of the scan, all after it.

The first and last part run the user's own loss function on a model in which a stand-in replaces the layers. The
stand-in stops with the residual stream that enters the scanned layers, or continues from one that left them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.layer import Context
from jaxstack.models.layer_sums import LayerSums
from jaxstack.models.layer_weights import Weights, gather_layers
from jaxstack.models.remat import rematerialise
from jaxstack.models.stack import Caches, Stack
from jaxstack.models.transformer import Transformer
from jaxstack.parallel.static_leaves import split_arrays

RunLoss = Callable[[Transformer], Any]
"""Runs the loss of a microbatch on a model."""


class LayerInputs(NamedTuple):
    """Inputs that all layers share for one microbatch: positions and masks (`Context`), and dropout key."""

    context: Context
    key: jax.Array | None


RunRepetition = Callable[[Weights, jax.Array, LayerInputs, jax.Array], tuple[jax.Array, LayerSums]]
"""(weights of one repetition, x [B, T, D], shared inputs, its number) -> (x, its sums)."""


def is_stacked(path: tuple[Any, ...], variable: object) -> bool:
    """Return True for parameters of scanned layers, which are stacked; usable as an NNX filter."""
    axes = variable.get_metadata().get("logical_axes") if isinstance(variable, nnx.Variable) else None
    return bool(axes) and axes[0] == "layers"


class _LayersReached(Exception):
    """Exception that leaves a user's loss function early, carrying the input of the scanned layers out of the model."""

    def __init__(self, x: jax.Array, sums: LayerSums, inputs: LayerInputs):
        super().__init__()
        self.x = x
        self.sums = sums
        self.inputs = inputs


class _StopBeforeScan(nnx.Module):
    """Replacement for the model's layers that stops the forward pass before the scanned ones.

    Args:
      stack: runs its single layers before the scan first; None: stop at once.
    """

    def __init__(self, stack: Stack | None = None):
        self.stack = stack

    def __call__(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, Caches, LayerSums]:
        if context.records_experts:
            raise ValueError("stages of a pipeline do not record experts; set parallel.pipeline=1.")
        sums: LayerSums = {}
        if self.stack is not None:
            x, _, sums = self.stack.run_before_scan(x, context, caches, key, dtype)
        raise _LayersReached(x, sums, LayerInputs(context, key))


class _ContinueAfterScan(nnx.Module):
    """Replacement for the model's layers that runs only those after the scan, on a given residual stream."""

    def __init__(self, stack: Stack, x: jax.Array):
        self.stack = stack
        self.x = nnx.data(x)

    def __call__(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, Caches, LayerSums]:
        x, _, sums = self.stack.run_after_scan(self.x, context, caches, key, dtype)
        return x, None, sums


class _ZeroEmbedding(nnx.Module):
    """Embedding that outputs zeros, for use where the output is not needed; a tied head may still use its table."""

    def __init__(self, table: nnx.Param, size: int):
        self.table = table
        self.size = size

    def __call__(self, ids: Int[Array, "B T"], dtype: jax.typing.DTypeLike) -> Float[Array, "B T D"]:
        return jnp.zeros((*ids.shape, self.size), dtype)


def inputs_of_layers(model: Transformer, run: RunLoss) -> tuple[Float[Array, "B T D"], LayerSums]:
    """Run the model up to the layer scan; return the scan's input, and the sums of the layers before it."""
    reached = _run_to_layers(model, run, _StopBeforeScan(model.decoder))
    return reached.x, reached.sums


def shared_inputs(model: Transformer, run: RunLoss) -> LayerInputs:
    """Return the inputs that all layers share, such as rotary angles, without running embedding or layers."""
    _replace(model, embedding=_zero_embedding(model), position_embedding=None)
    return _run_to_layers(model, run, _StopBeforeScan()).inputs


def loss_of_outputs(model: Transformer, run: RunLoss, x: Float[Array, "B T D"]) -> Any:
    """Compute the loss from x, the output of the layer scan, by running only the rest of the model."""
    _replace(model, decoder=_ContinueAfterScan(model.decoder, x))
    if model.mtp is None:  # it embeds tokens too
        _replace(model, embedding=_zero_embedding(model), position_embedding=None)
    return run(model)


def make_repetition_function(model: Transformer) -> RunRepetition:
    """Create a function that runs one repetition of the scanned layer pattern with given weights.

    Its weights are an NNX state of the parameters that `is_stacked` selects, without the dim of layers.

    Raises:
      ConfigError: layers of the model read more than the residual stream.
    """
    model.config.check_independent_layers("a pipeline", "set parallel.pipeline=1")
    stack = model.decoder
    dtype = model.dtype

    def run(weights: Weights, x: jax.Array, inputs: LayerInputs, number: jax.Array) -> tuple[jax.Array, LayerSums]:
        # `jax.checkpoint` would trace the booleans of the context, which layers branch on.
        arrays, join = split_arrays(inputs)

        def repeat(weights: Weights, x: jax.Array, arrays: list, number: jax.Array) -> tuple[jax.Array, LayerSums]:
            inputs = join(arrays)
            gathered = gather_layers([weights["decoder"]["layers"][i] for i in stack.scanned], dtype)
            x, (_, sums) = stack.run_repetition(x, gathered, inputs.context, None, inputs.key, number)
            return x, stack.sums_of_repetition(sums, number)

        return rematerialise(repeat, stack.remat, scanned=True)(weights, x, arrays, number)

    return run


def _run_to_layers(model: Transformer, run: RunLoss, stand_in: _StopBeforeScan) -> _LayersReached:
    _replace(model, decoder=stand_in)
    try:
        run(model)
    except _LayersReached as reached:
        return reached
    raise TypeError("the loss function never ran the layers of the model.")


def _zero_embedding(model: Transformer) -> _ZeroEmbedding:
    return _ZeroEmbedding(model.embedding.table, model.config.hidden_size)


def _replace(model: Transformer, **parts: nnx.Module | None) -> None:
    for name, part in parts.items():
        setattr(model, name, part)
