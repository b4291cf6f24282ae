"""Compresses a Transformer one layer at a time, calibrating each on the outputs of the compressed layers before it.

Only one layer's statistics and the residual stream of the calibration text are in memory at a time.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from jaxstack.errors import ConfigError
from jaxstack.models.block import Block
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import AxisRules
from pallas_kernels.weight_only.packed import PackedWeight

HEAD = "head"
TABLE = "embedding/table"
"""Paths of the output head [D, V] and of the embedding [V, D], which a tied model multiplies with as its head."""


@dataclasses.dataclass(frozen=True)
class LayerwiseResult:
    """Result of compressing a model layer by layer: the changed weights, and the errors of layers' outputs.

    Attributes:
      weights: changed weights by path, with the layer's number, such as `decoder/layers/3/mlp/down_proj/kernel`: the
        compressed weights (pruned ones as arrays in the shape of the parameter), and others that a method changed with
        them, such as the scales of norms.
      output_errors: relative squared error of the output of each compressed matrix, |W' X - W X|^2 / |W X|^2 over the
        calibration inputs X; only of matrices whose method measures the Hessian.
    """

    weights: dict[str, PackedWeight | jax.Array] = dataclasses.field(default_factory=dict)
    output_errors: dict[str, float] = dataclasses.field(default_factory=dict)


def compress_layers(
    model: Transformer,
    batches: Sequence[Mapping[str, Any]],
    methods: Mapping[str, Method],
    *,
    rules: AxisRules | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> LayerwiseResult:
    """Compress a Transformer one layer at a time in forward order, calibrating each on the compressed layers before it.

    The embedding of a tied model is compressed last if its method needs calibration, as it is then the head.

    Args:
      model: the Transformer, with float32 weights and without adapters; its arrays are not changed. Layers may be
        stacked for a scan.
      batches: calibration text, `tokens` [B, T] int32, and with packing `positions` and `segment_ids` [B, T].
      methods: method of each weight to compress by its path; see `LayerwiseResult.weights`.
      rules: sharding rules of the mesh; None: one device.
      report: called with a line for each layer, and with each warning, such as one of a matrix that a solver could not
        factorize.

    Raises:
      ConfigError: a method needs the inputs of an embedding that is not the head.
      KeyError: a path of `methods` is no weight that can be compressed.
    """
    model = nnx.merge(*nnx.split(model))
    run = _Run(model, LayerRunner(model.dtype, rules), report)
    pending = dict(methods)
    known = {*run.kernel_paths(), TABLE, *([HEAD] if model.head is not None else [])}
    if unknown := pending.keys() - known:
        raise KeyError(f"{sorted(unknown)[0]!r} is no weight that can be compressed; there are {sorted(known)}.")
    if TABLE in pending and not pending[TABLE].needs:
        packed = run.compress(TABLE, pending.pop(TABLE), model.embedding.table[...], None)
        model.embedding.table[...] = packed.matrix() if isinstance(packed, PackedWeight) else packed
    elif TABLE in pending and model.head is not None:
        raise ConfigError(
            f"{TABLE} cannot be compressed by a method that measures a layer's inputs, which are token ids here: put "
            f"{{path: {TABLE}, method: keep}} before the rule with path {pending[TABLE].path!r}, or round it (rtn)."
        )
    streams = run.runner.embed(model, batches)
    for number, block in layers_in_order(model.decoder):
        prefix = f"decoder/layers/{number}/"
        chosen = {name: pending[prefix + name] for name in _kernels(block) if prefix + name in pending}
        report(f"layer {number + 1} of {model.config.num_layers}: {len(chosen)} weights")
        streams = run.runner.apply(run.compress_block(block, streams, chosen, prefix), streams)
    for path, w in ((HEAD, model.head), (TABLE, model.embedding.table)):
        if path in pending and w is not None:
            method = pending[path]
            statistics = run.runner.measure_head(model, streams, method.needs) if method.needs else None
            run.compress(path, method, w[...], statistics)
    return run.result


class _Run:
    """State of a layer-by-layer compression: the model, the functions that run its layers, and the result so far."""

    def __init__(self, model: Transformer, runner: LayerRunner, report: Callable[[str], None]):
        self.model = model
        self.runner = runner
        self.report = report
        self.result = LayerwiseResult()

    def kernel_paths(self) -> list[str]:
        """Return the model's parameter paths of the dense kernels in all Transformer layers."""
        stack = self.model.decoder
        return [
            f"decoder/layers/{number}/{name}"
            for index, block in enumerate(stack.layers)
            for number in stack.layer_numbers(index)
            for name in _kernels(block)
        ]

    def compress_block(
        self, block: Block, streams: Sequence[Batch], methods: Mapping[str, Method], prefix: str
    ) -> Block:
        """Compress the weights of a Transformer layer, record them in the result, and return the compressed layer.

        Args:
          streams: inputs of the block.
          methods: method of each kernel to compress, by its path in the block.
          prefix: beginning of these paths in the model.
        """
        needs = {name.removesuffix("/kernel"): method.needs for name, method in methods.items() if method.needs}
        measured = self.runner.measure(block, streams, needs) if needs else {}
        statistics = {f"{path}/kernel": found for path, found in measured.items()}
        graphdef, state = nnx.split(block)
        calibration = self.runner.calibration_block(self.model, block, streams, statistics, methods)
        for method in dict.fromkeys(method for method in methods.values() if method.needs):
            replaced = method.rescaled_weights(calibration)
            self.result.weights.update({prefix + name: value for name, value in replaced.items()})
            state = replace_weights(state, replaced)
            calibration = dataclasses.replace(calibration, weights=weights_by_path(state))
        for name, contracted in _kernels(block).items():
            if name in methods:
                w = calibration.weights[name]
                found = statistics.get(name)
                new = self.compress(prefix + name, methods[name], w, found, contracted)
                dense = new.dense() if isinstance(new, PackedWeight) else new
                state = replace_weights(state, {name: dense.astype(w.dtype)})
        return nnx.merge(graphdef, state)

    def compress(
        self,
        path: str,
        method: Method,
        w: Float[Array, "..."],
        statistics: InputStatistics | None,
        contracted: int = 1,
    ) -> Compressed:
        """Compress one weight, record it and its output error in the result, and return it in its original shape.

        Args:
          path: path of the weight in the model.
          w: the weight.
          statistics: statistics of its inputs, if the method needs them.
          contracted: number of its leading dims that are inputs.
        """
        inputs = w.shape[:contracted]
        outputs = w.shape[contracted:]
        matrix = w.astype(jnp.float32).reshape(math.prod(inputs), -1)
        is_table = path == TABLE  # its rows are the outputs of the head
        matrix = matrix if is_table else matrix.T
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = method.compress(matrix, statistics)
        for warning in caught:
            self.report(f"{path}: {warning.message}")
        dense = found.matrix() if isinstance(found, PackedWeight) else found
        if statistics is not None and statistics.hessian is not None:
            self.result.output_errors[path] = float(_relative_error(matrix, dense, statistics.hessian))
        if isinstance(found, PackedWeight):
            new = found if is_table else found.with_dims(inputs, outputs)
        else:
            new = found if is_table else found.T.reshape(w.shape)
        self.result.weights[path] = new
        return new


def _kernels(block: Block) -> dict[str, int]:
    """Return {path: number of its leading dims that are contracted with the input} for the dense kernels of a block."""
    return {f"{path}/kernel": layer.contracted for path, layer in dense_layers(block).items()}


@jax.jit
def _relative_error(
    w: Float[Array, "out in"], new: Float[Array, "out in"], hessian: Float[Array, "in in"]
) -> Float[Array, ""]:
    """Return the relative squared output error |W' X - W X|^2 / |W X|^2, from the Hessian of the inputs X."""

    def square(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jnp.matmul(w, hessian, precision=jax.lax.Precision.HIGHEST))

    return square(new - w) / jnp.maximum(square(w), jnp.finfo(jnp.float32).tiny)
