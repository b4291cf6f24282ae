"""Compresses a Transformer one layer at a time, calibrating each on the outputs of the compressed layers before it.

Only one layer's statistics and the residual stream of the calibration text are in memory at a time.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress.after_training.calibrate import (
    Batch,
    LayerRunner,
    MeasuredExperts,
    input_source,
    layers_in_order,
    replace_weights,
    weights_by_path,
)
from jaxstack.compress.base import (
    AfterTraining,
    Compressed,
    InputStatistics,
    LayerStatistics,
    Statistic,
    dense_matrix,
    stack_compressed,
)
from jaxstack.compress.matrix import MatrixLayout, find_weights, layer_kernels
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
        compressed weights (those with zeros that are not 2:4 as arrays in the shape of the parameter), and others that
        a method changed with them, such as the scales of norms.
      output_errors: relative squared error of the output of each compressed matrix, |W' X - W X|^2 / |W X|^2 over the
        calibration inputs X; of experts over those of all; only of matrices whose method measures the Hessian.
      expert_tokens: number of calibration tokens that each expert of a mixture gets, by the mixture's path, such as
        `decoder/layers/3/mlp`; only of mixtures whose methods measure inputs.
    """

    weights: dict[str, PackedWeight | jax.Array] = dataclasses.field(default_factory=dict)
    output_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    expert_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def compress_layers(
    model: Transformer,
    batches: Sequence[Mapping[str, Any]],
    methods: Mapping[str, AfterTraining],
    *,
    rules: AxisRules | None = None,
    expert_tokens: int = 0,
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
      expert_tokens: an expert with fewer routed tokens is calibrated on all tokens instead, which `report` tells.
      report: called with a line for each layer, and with each warning, such as one of a matrix that a solver could not
        factorize.

    Raises:
      ConfigError: a method needs the inputs of an embedding that is not the head.
      KeyError: a path of `methods` is no weight that can be compressed.
    """
    run = LayerCompression(model, LayerRunner(model.dtype, rules), expert_tokens, report)
    changed = {}
    for part in run.parts(batches, methods):
        changed |= part.changed
    return dataclasses.replace(run.result, weights=changed)


PartOfModel = TypeVar("PartOfModel", bound=nnx.Module)


class Part(NamedTuple):
    """The parameters of a layer, or an embedding or head, by path in the model, before and after compression."""

    before: dict[str, jax.Array]
    """All its parameters, float32."""
    changed: dict[str, PackedWeight | jax.Array]
    """The parameters that were changed, as in `LayerwiseResult.weights`."""


Read: TypeAlias = Callable[[str], Any]
"""Path in the model -> the parameter there as an array, or those below it as nested dicts of arrays."""


class LayerCompression:
    """State of a layer-by-layer compression: the model, the functions that run its layers, and the result so far.

    Args:
      model: the model, not changed; with `read` these parameters are shapes.
      runner: runs its layers.
      expert_tokens, report: as in `compress_layers`.
      read: reads the parameters of a layer, embedding or head when they are needed; None: the model has them.
    """

    def __init__(
        self,
        model: Transformer,
        runner: LayerRunner,
        expert_tokens: int,
        report: Callable[[str], None],
        read: Read | None = None,
    ):
        self.model = nnx.merge(*nnx.split(model))
        self.read = read
        self.runner = runner
        self.expert_tokens = expert_tokens
        self.report = report
        self.result = LayerwiseResult()
        self.ends = {weight.path: weight.layout for weight in find_weights(model) if weight.path in (HEAD, TABLE)}

    def parts(self, batches: Sequence[Mapping[str, Any]], methods: Mapping[str, AfterTraining]) -> Iterator[Part]:
        """Compress the model and yield each part once it is done: embedding, layers, head; of a tied model once.

        The arguments and errors are those of `compress_layers`.
        """
        model = self.model
        pending = dict(methods)
        known = {*self.kernel_paths(), TABLE, *([HEAD] if model.head is not None else [])}
        if unknown := pending.keys() - known:
            raise KeyError(f"{sorted(unknown)[0]!r} is no weight that can be compressed; there are {sorted(known)}.")
        if TABLE in pending and pending[TABLE].needs and model.head is not None:
            raise ConfigError(
                f"{TABLE} cannot be compressed by a method that measures a layer's inputs, which are token ids here: "
                f"put {{path: {TABLE}, method: keep}} before the rule with path {pending[TABLE].path!r}, or round it "
                "(rtn)."
            )
        whole = model.embedding
        embedding = self.load(whole, "embedding")
        table = embedding.table[...]
        if TABLE in pending and not pending[TABLE].needs:
            embedding.table[...] = self.compress(TABLE, pending.pop(TABLE), table, self.ends[TABLE])
        if TABLE not in pending:
            yield Part({TABLE: table}, self.take_changed())
        del table
        model.embedding = embedding
        streams = self.runner.embed(model, batches)
        model.embedding = whole
        del embedding
        for number, block in layers_in_order(model.decoder):
            prefix = f"decoder/layers/{number}/"
            block = self.load(block, prefix[:-1])
            chosen = {name: pending[prefix + name] for name in layer_kernels(block) if prefix + name in pending}
            self.report(f"layer {number + 1} of {model.config.num_layers}: {len(chosen)} weights")
            before = {prefix + name: w for name, w in weights_by_path(nnx.state(block)).items()}
            streams = self.runner.apply(self.compress_block(block, streams, chosen, prefix), streams)
            yield Part(before, self.take_changed())
        for path, w in ((HEAD, model.head), (TABLE, model.embedding.table)):
            if path in pending and w is not None:
                method = pending[path]
                statistics = self.runner.measure_head(model, streams, method.needs) if method.needs else None
                before = w[...] if self.read is None else self.read(path)
                self.compress(path, method, before, self.ends[path], statistics)
                yield Part({path: before}, self.take_changed())

    def load(self, part: PartOfModel, path: str) -> PartOfModel:
        """Return a part of the model with its parameters as arrays."""
        if self.read is None:
            return part
        graphdef, state = nnx.split(part)
        return nnx.merge(graphdef, replace_weights(state, named_leaves(self.read(path))))

    def take_changed(self) -> dict[str, PackedWeight | jax.Array]:
        """Return the changed weights that were recorded since the last call, and forget them."""
        found = dict(self.result.weights)
        self.result.weights.clear()
        return found

    def kernel_paths(self) -> list[str]:
        """Return the model's parameter paths of the kernels of dense layers and experts in all Transformer layers."""
        stack = self.model.decoder
        return [
            f"decoder/layers/{number}/{name}"
            for index, block in enumerate(stack.layers)
            for number in stack.layer_numbers(index)
            for name in layer_kernels(block)
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
        layouts = layer_kernels(block)
        measured = self.measure(block, streams, layouts, methods, prefix)
        statistics = {f"{path}/kernel": found for path, found in measured.items()}
        graphdef, state = nnx.split(block)
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

    def measure(
        self,
        block: Block,
        streams: Sequence[Batch],
        layouts: Mapping[str, MatrixLayout],
        methods: Mapping[str, AfterTraining],
        prefix: str,
    ) -> dict[str, LayerStatistics]:
        """Measure the inputs of a block's dense layers and experts whose methods need statistics, by path in the block.

        The arguments are those of `compress_block`, and the block's kernels as matrices.
        """
        needs = {name.removesuffix("/kernel"): method.needs for name, method in methods.items() if method.needs}
        experts = {path: wanted for path, wanted in needs.items() if layouts[f"{path}/kernel"].stack}
        dense = {path: wanted for path, wanted in needs.items() if path not in experts}
        found: dict[str, LayerStatistics] = {**self.runner.measure(block, streams, dense)} if dense else {}
        for mixture in dict.fromkeys(path.rpartition("/")[0] for path in experts):
            own = {path: wanted for path, wanted in experts.items() if path.rpartition("/")[0] == mixture}
            found |= self.measure_mixture(block, streams, mixture, own, prefix)
        return found

    def measure_mixture(
        self,
        block: Block,
        streams: Sequence[Batch],
        mixture: str,
        needs: Mapping[str, frozenset[Statistic]],
        prefix: str,
    ) -> dict[str, LayerStatistics]:
        """Measure the inputs of a mixture's experts by path in the block; report how the router uses them."""
        sources = {path: input_source(path) for path in needs}
        joined: dict[str, frozenset[Statistic]] = {}
        for path, source in sources.items():
            name = source.rpartition("/")[2]
            joined[name] = joined.get(name, frozenset()) | needs[path]
        measured = self.runner.measure_experts(block, streams, mixture, joined, self.expert_tokens)
        self.result.expert_tokens[prefix + mixture] = measured.counts
        self.report(describe_expert_tokens(prefix + mixture, measured, self.expert_tokens))
        return {path: measured.statistics[source.rpartition("/")[2]] for path, source in sources.items()}

    def compress(
        self,
        path: str,
        method: AfterTraining,
        w: Float[Array, "..."],
        layout: MatrixLayout,
        statistics: LayerStatistics | None = None,
    ) -> Float[Array, "..."]:
        """Compress one weight, record it and its output error in the result, and return its new values as an array.

        Args:
          path: path of the weight in the model.
          w: the weight.
          layout: the weight as a matrix, or as a stack of those of experts.
          statistics: statistics of its inputs, if the method needs them.
        """
        matrices = layout.to_matrices(w.astype(jnp.float32))
        if not layout.stack:
            assert not isinstance(statistics, tuple)
            found = self._compress_matrix(path, method, matrices, statistics)
            inputs = [statistics]
        else:
            inputs = statistics if isinstance(statistics, tuple) else [None] * len(matrices)
            found = stack_compressed([
                self._compress_matrix(f"{path}, expert {expert}", method, matrix, own)
                for expert, (matrix, own) in enumerate(zip(matrices, inputs, strict=True))
            ])  # fmt: skip
        dense = dense_matrix(found)
        pairs = zip(matrices.reshape(-1, *layout.size), dense.reshape(-1, *layout.size), inputs, strict=True)
        squares = [_squares(*pair[:2], pair[2].hessian, pair[2].count) for pair in pairs if _has_hessian(pair[2])]
        if squares:
            change, whole = jnp.sum(jnp.stack(squares), axis=0)
            self.result.output_errors[path] = float(change / jnp.maximum(whole, jnp.finfo(jnp.float32).tiny))
        self.result.weights[path] = layout.from_compressed(found)
        return layout.from_matrices(dense)

    def _compress_matrix(
        self, name: str, method: AfterTraining, matrix: Float[Array, "out in"], statistics: InputStatistics | None
    ) -> Compressed:
        """Compress one matrix, and report each warning with its name."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = method.compress(matrix, statistics)
        for warning in caught:
            self.report(f"{name}: {warning.message}")
        return found


def describe_expert_tokens(mixture: str, measured: MeasuredExperts, fewest: int) -> str:
    """Return a line that says how many calibration tokens a mixture's experts get, and which get too few."""
    counts = measured.counts
    line = (
        f"{mixture}: {min(counts):,} to {max(counts):,} tokens an expert, {sum(counts) / len(counts):,.0f} in the mean"
    )
    if not measured.rare:
        return line
    few = ", ".join(f"{expert} ({counts[expert]:,})" for expert in measured.rare)
    return f"{line}; with fewer than {fewest:,}, and calibrated on all tokens instead: experts {few}"


def _has_hessian(statistics: InputStatistics | None) -> TypeGuard[InputStatistics]:
    return statistics is not None and statistics.hessian is not None


@jax.jit
def _squares(
    w: Float[Array, "out in"], new: Float[Array, "out in"], hessian: Float[Array, "in in"], count: int
) -> Float[Array, "2"]:
    """Return |W' X - W X|^2 and |W X|^2 from the Hessian and the number of the inputs X."""

    def square(w: jax.Array) -> jax.Array:
        return count / 2 * jnp.sum(w * jnp.matmul(w, hessian, precision=jax.lax.Precision.HIGHEST))

    return jnp.stack([square(new - w), square(w)])
