"""Compresses a Transformer one layer at a time, calibrating each on the outputs of the compressed layers before it.

Only one layer's statistics and the residual stream of the calibration text are in memory at a time.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.compress.after_training.calibrate import (
    Batch,
    LayerRunner,
    layers_in_order,
    replace_weights,
    weights_by_path,
)
from jaxstack.compress.base import AfterTraining, InputStatistics, dense_matrix
from jaxstack.compress.matrix import MatrixLayout, dense_kernels, find_weights
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
    methods: Mapping[str, AfterTraining],
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
        model.embedding.table[...] = run.compress(
            TABLE, pending.pop(TABLE), model.embedding.table[...], run.ends[TABLE]
        )
    elif TABLE in pending and model.head is not None:
        raise ConfigError(
            f"{TABLE} cannot be compressed by a method that measures a layer's inputs, which are token ids here: put "
            f"{{path: {TABLE}, method: keep}} before the rule with path {pending[TABLE].path!r}, or round it (rtn)."
        )
    streams = run.runner.embed(model, batches)
    for number, block in layers_in_order(model.decoder):
        prefix = f"decoder/layers/{number}/"
        chosen = {name: pending[prefix + name] for name in dense_kernels(block) if prefix + name in pending}
        report(f"layer {number + 1} of {model.config.num_layers}: {len(chosen)} weights")
        streams = run.runner.apply(run.compress_block(block, streams, chosen, prefix), streams)
    for path, w in ((HEAD, model.head), (TABLE, model.embedding.table)):
        if path in pending and w is not None:
            method = pending[path]
            statistics = run.runner.measure_head(model, streams, method.needs) if method.needs else None
            run.compress(path, method, w[...], run.ends[path], statistics)
    return run.result


class _Run:
    """State of a layer-by-layer compression: the model, the functions that run its layers, and the result so far."""

    def __init__(self, model: Transformer, runner: LayerRunner, report: Callable[[str], None]):
        self.model = model
        self.runner = runner
        self.report = report
        self.result = LayerwiseResult()
        self.ends = {weight.path: weight.layout for weight in find_weights(model) if weight.path in (HEAD, TABLE)}

    def kernel_paths(self) -> list[str]:
        """Return the model's parameter paths of the dense kernels in all Transformer layers."""
        stack = self.model.decoder
        return [
            f"decoder/layers/{number}/{name}"
            for index, block in enumerate(stack.layers)
            for number in stack.layer_numbers(index)
            for name in dense_kernels(block)
        ]

    def compress_block(
        self, block: Block, streams: Sequence[Batch], methods: Mapping[str, AfterTraining], prefix: str
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
        layouts = dense_kernels(block)
        calibration = self.runner.calibration_block(self.model, block, streams, layouts, statistics, methods)
        for method in dict.fromkeys(method for method in methods.values() if method.needs):
            replaced = method.rescaled_weights(calibration)
            self.result.weights.update({prefix + name: value for name, value in replaced.items()})
            state = replace_weights(state, replaced)
            calibration = dataclasses.replace(calibration, weights=weights_by_path(state))
        for name in filter(methods.__contains__, layouts):
            w = calibration.weights[name]
            new = self.compress(prefix + name, methods[name], w, layouts[name], statistics.get(name))
            state = replace_weights(state, {name: new.astype(w.dtype)})
        return nnx.merge(graphdef, state)

    def compress(
        self,
        path: str,
        method: AfterTraining,
        w: Float[Array, "..."],
        layout: MatrixLayout,
        statistics: InputStatistics | None = None,
    ) -> Float[Array, "..."]:
        """Compress one weight, record it and its output error in the result, and return its new values as an array.

        Args:
          path: path of the weight in the model.
          w: the weight.
          layout: the weight as a matrix.
          statistics: statistics of its inputs, if the method needs them.
        """
        matrix = layout.to_matrices(w.astype(jnp.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = method.compress(matrix, statistics)
        for warning in caught:
            self.report(f"{path}: {warning.message}")
        dense = dense_matrix(found)
        if statistics is not None and statistics.hessian is not None:
            self.result.output_errors[path] = float(_relative_error(matrix, dense, statistics.hessian))
        self.result.weights[path] = layout.from_compressed(found)
        return layout.from_matrices(dense)


@jax.jit
def _relative_error(
    w: Float[Array, "out in"], new: Float[Array, "out in"], hessian: Float[Array, "in in"]
) -> Float[Array, ""]:
    """Return the relative squared output error |W' X - W X|^2 / |W X|^2, from the Hessian of the inputs X."""

    def square(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jnp.matmul(w, hessian, precision=jax.lax.Precision.HIGHEST))

    return square(new - w) / jnp.maximum(square(w), jnp.finfo(jnp.float32).tiny)
