"""Compression of a Transformer layer by layer, where each layer is calibrated on the outputs of compressed ones.

Only one layer's statistics and the residual stream of the calibration text are in memory at a time.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.compress.calibrate import (
    Batch,
    LayerRunner,
    dense_layers,
    layers_in_order,
    replace_weights,
    weights_by_path,
)
from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from jaxstack.models.block import Block
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import AxisRules
from pallas_kernels.weight_only.packed import PackedWeight

HEAD = "head"
"""Path of the output head's matrix."""
Weights: TypeAlias = dict[str, PackedWeight | jax.Array]
"""Changed weights by their path in the model, in the weight's own shape."""


@dataclasses.dataclass(frozen=True)
class LayerwiseResult:
    """A compressed model.

    Attributes:
      weights: changed weights by path, such as `decoder/layers/3/mlp/down_proj/kernel` with the number of the model's
        layer: compressed matrices, and weights that a method replaced beside them, such as the scales of norms.
      output_errors: relative squared error of the output of each compressed matrix, |W' X - W X|^2 / |W X|^2 over the
        calibration inputs X; only of matrices whose method measures the Hessian.
    """

    weights: Weights
    output_errors: dict[str, float]


def compress_layers(
    model: Transformer,
    batches: Sequence[Mapping[str, Any]],
    methods: Mapping[str, Method],
    *,
    rules: AxisRules | None = None,
    report: Callable[[str], None] = warnings.warn,
) -> LayerwiseResult:
    """Compress the dense layers of a Transformer in the order in which a forward pass reaches them.

    Args:
      model: the Transformer, with float32 weights and without adapters; its arrays are not changed.
      batches: calibration text, `tokens` [B, T] int32, and with packing `positions` and `segment_ids` [B, T].
      methods: method of each weight by its path; see `LayerwiseResult.weights`. `head` is the output head.
      rules: sharding rules of the mesh; None: one device.
      report: called with each warning, such as one of a matrix that a solver could not factorize.

    Raises:
      KeyError: a path of `methods` is no dense layer's.
    """
    runner, result = LayerRunner(model.dtype, rules), LayerwiseResult({}, {})
    pending, streams = dict(methods), runner.embed(model, batches)
    for number, block in layers_in_order(model.decoder):
        prefix = f"decoder/layers/{number}/"
        chosen = {name: pending.pop(prefix + name) for name in _kernels(block) if prefix + name in pending}
        block = _compress_block(runner, model, block, streams, chosen, prefix, result, report)
        streams = runner.apply(block, streams)
    if HEAD in pending and model.head is not None:
        method = pending.pop(HEAD)
        statistics = runner.measure_head(model, streams, method.needs) if method.needs else None
        w, dims = model.head[...], (model.head.shape[:1], model.head.shape[1:])
        _store(result, HEAD, _compress(method, w, dims, statistics, HEAD, report), w, statistics)
    if pending:
        raise KeyError(f"{sorted(pending)[0]!r} is no dense layer of the model.")
    return result


def replace_parameters(params: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an unrolled model with other leaves at the paths of `weights`.

    Args:
      params: nested dicts of arrays.
      weights: new leaves by path, such as `LayerwiseResult.weights`.

    Raises:
      KeyError: a path is no parameter's.
    """
    new = {key: dict(value) if isinstance(value, Mapping) else value for key, value in params.items()}
    inner: dict[str, dict[str, Any]] = {}
    for path, leaf in weights.items():
        key, _, rest = path.partition("/")
        if key not in new or bool(rest) != isinstance(new[key], Mapping):
            raise KeyError(f"no parameter {path!r}; an unrolled model has {sorted(new)} there.")
        if rest:
            inner.setdefault(key, {})[rest] = leaf
        else:
            new[key] = leaf
    return new | {key: replace_parameters(new[key], leaves) for key, leaves in inner.items()}


def _kernels(block: Block) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the (inputs, outputs) dims of the kernels of a block by path, such as `mlp/up_proj/kernel`."""
    layers = dense_layers(block)
    return {
        f"{path}/kernel": (layer.kernel.shape[: layer.contracted], layer.kernel.shape[layer.contracted :])
        for path, layer in layers.items()
    }


def _compress_block(
    runner: LayerRunner,
    model: Transformer,
    block: Block,
    streams: Sequence[Batch],
    methods: Mapping[str, Method],
    prefix: str,
    result: LayerwiseResult,
    report: Callable[[str], None],
) -> Block:
    """Return the block with its weights as compressed, and add them to the result."""
    needs = {name.removesuffix("/kernel"): method.needs for name, method in methods.items() if method.needs}
    measured = runner.measure(block, streams, needs) if needs else {}
    statistics = {f"{path}/kernel": found for path, found in measured.items()}
    graphdef, state = nnx.split(block)
    calibration = runner.calibration_block(model, block, streams, statistics, methods)
    for method in dict.fromkeys(method for method in methods.values() if method.needs):
        replaced = method.rescale(calibration)
        result.weights.update({prefix + name: value for name, value in replaced.items()})
        state = replace_weights(state, replaced)
        calibration = dataclasses.replace(calibration, weights=weights_by_path(state))
    for name, dims in _kernels(block).items():
        if name in methods:
            w, found = calibration.weights[name], statistics.get(name)
            compressed = _compress(methods[name], w, dims, found, prefix + name, report)
            _store(result, prefix + name, compressed, w, found)
            dense = compressed.dense() if isinstance(compressed, PackedWeight) else compressed
            state = replace_weights(state, {name: dense})
    return nnx.merge(graphdef, state)


def _compress(
    method: Method,
    w: Float[Array, "..."],
    dims: tuple[tuple[int, ...], tuple[int, ...]],
    statistics: InputStatistics | None,
    path: str,
    report: Callable[[str], None],
) -> Compressed:
    """Return the compressed weight in its own shape."""
    inputs, outputs = dims
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = method.compress(w.astype(jnp.float32).reshape(math.prod(inputs), -1).T, statistics)
    for warning in caught:
        report(f"{path}: {warning.message}")
    return found.with_dims(inputs, outputs) if isinstance(found, PackedWeight) else found.T.reshape(w.shape)


def _store(
    result: LayerwiseResult, path: str, compressed: Compressed, w: jax.Array, statistics: InputStatistics | None
) -> None:
    result.weights[path] = compressed
    if statistics is not None and statistics.hessian is not None:
        dense = compressed.dense() if isinstance(compressed, PackedWeight) else compressed
        width = len(statistics.hessian)
        error = _relative_error(w.reshape(width, -1), dense.reshape(width, -1), statistics.hessian)
        result.output_errors[path] = float(error)


@jax.jit
def _relative_error(
    w: Float[Array, "in out"], new: Float[Array, "in out"], hessian: Float[Array, "in in"]
) -> Float[Array, ""]:
    """Return |W' X - W X|^2 / |W X|^2 for inputs X with this Hessian."""

    def square(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jnp.matmul(hessian, w, precision=jax.lax.Precision.HIGHEST))

    return square(new - w) / jnp.maximum(square(w), jnp.finfo(jnp.float32).tiny)
