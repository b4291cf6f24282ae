"""Runs the layers of a Transformer over calibration text one at a time, and measures the inputs of dense layers.

The text is sequences of a run's own training text, or of given files.

Dims: B batch, T sequence, D model, E experts.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.compress.after_training.expert_inputs import (
    RoutedTokens,
    expert_rows,
    expert_sums,
    mixtures,
    route_tokens,
)
from jaxstack.compress.base import (
    AfterTraining,
    CalibrationBlock,
    Change,
    InputStatistics,
    LayerStatistics,
    Statistic,
    Sublayer,
)
from jaxstack.compress.config import CalibrationConfig
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.data.build_shards import available_cores
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import Data, open_data
from jaxstack.errors import ConfigError
from jaxstack.models.block import Block
from jaxstack.models.layer import Context
from jaxstack.models.layer_weights import Weights, gather_weights
from jaxstack.models.linear import Linear
from jaxstack.models.moe_layer import MoE
from jaxstack.models.stack import Stack, unstack_block
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import AxisRules, logical_axis_rules
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel

_LONGEST_DEFAULT = 2048
"""Tokens of a sequence for a Hugging Face checkpoint, unless the model has fewer positions."""


def read_calibration(
    stored: StoredModel,
    config: RunConfig,
    calibration: CalibrationConfig,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, np.ndarray]]:
    """Read calibration text as batches of `tokens`, with packing also `positions` and `segment_ids`, int32 [B, T].

    The rows are the first ones of the training order, without augmentation.

    Args:
      stored: the model on disk.
      config: its configuration, from `jaxstack.run.load.run_config`.
      calibration: how many sequences, of which text.
      report: called with each line of progress while data is prepared.

    Raises:
      ConfigError: there is no text, or too little of it.
    """
    if not calibration.data and not stored.held_out_text:
        raise ConfigError(
            f"{stored.directory} has no training text of its own to calibrate on: name files in "
            "calibration.data of the recipe, or at the end of the command, as 'calibration.data=[texts/*.txt]'."
        )
    length = calibration.sequence_length or _default_length(config, stored.held_out_text)
    longest = config.model.max_position_embeddings
    if longest is not None and length > longest:
        raise ConfigError(
            f"calibration.sequence_length ({length:,}) must not exceed the model's max_position_embeddings "
            f"({longest:,}); lower it in the recipe, or end the command with calibration.sequence_length={longest}."
        )
    data = open_data(
        _data_section(stored, config.data, calibration.data),
        sequence_length=length,
        seed=config.run.seed,
        report=report,
        workers=available_cores(),
    )
    try:
        _check_enough(data, calibration.sequences, length)
        size = _batch_size(calibration)
        numbers = range(calibration.sequences // size)
        return [_inputs(data, number, size) for number in numbers]
    finally:
        data.close()


def _default_length(config: RunConfig, trained_here: bool) -> int:
    if trained_here:
        return config.train.sequence_length
    return min(_LONGEST_DEFAULT, config.model.max_position_embeddings or _LONGEST_DEFAULT)


def _data_section(stored: StoredModel, section: DataConfig, paths: tuple[str, ...]) -> DataConfig:
    """Return the data configuration for calibration: the run's own without augmentations, or of the given files."""
    if not paths:
        return section.model_copy(update={"augmentations": ()})
    return section.model_copy(
        update={
            "sources": tuple(SourceConfig(path=path) for path in paths),
            "held_out": (),
            "held_out_fraction": 0.0,
            "tokenizer": TokenizerConfig(name="file", path=str(stored.tokenizer_folder)),
            "augmentations": (),
        }
    )


def _check_enough(data: Data, sequences: int, length: int) -> None:
    rows = sum(data.rows_per_epoch)
    if rows < sequences:
        shorter = data.train_tokens // sequences
        ways = ["give more text in calibration.data"]
        if rows:
            ways.append(f"set calibration.sequences to at most {rows:,}")
        if shorter >= 2:
            ways.append(f"set calibration.sequence_length to at most {shorter:,}")
        raise ConfigError(
            f"the calibration text has {data.train_tokens:,} tokens, {rows:,} sequences of {length:,}; "
            f"calibration.sequences is {sequences:,}. To fix it, {', or '.join(ways)}."
        )


def _batch_size(calibration: CalibrationConfig) -> int:
    """Return the largest batch size, up to the configured one, that divides the number of calibration sequences."""
    wanted = min(calibration.batch_size, calibration.sequences)
    return next(size for size in range(wanted, 0, -1) if calibration.sequences % size == 0)


def _inputs(data: Data, number: int, size: int) -> dict[str, np.ndarray]:
    batch = data.batch(number, global_batch_size=size, rows=range(size))
    return {name: batch[name] for name in ("tokens", "positions", "segment_ids") if name in batch}


SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "gate_proj": "up_proj"}
"""Dense layer -> the dense layer of the same module that has the same input and is measured for both."""
SUBLAYER_INPUT: dict[Sublayer, str] = {"attention": "attention/q_proj", "mlp": "mlp/up_proj"}
"""Sublayer -> dense layer that has the sublayer's own input."""

Needs: TypeAlias = tuple[tuple[str, tuple[Statistic, ...]], ...]
"""(dense layer, statistics of its input), hashable."""
Sums: TypeAlias = dict[str, dict[Statistic, jax.Array]]
"""Dense layer -> statistic -> its sum over tokens; of experts [E, ...], a sum for each."""


class Batch(NamedTuple):
    """A batch of calibration sequences between two layers: hidden states, and shared inputs such as positions."""

    x: Float[Array, "B T D"]
    context: Context


class MeasuredExperts(NamedTuple):
    """Statistics of the inputs of a mixture's experts, and how many tokens they are from."""

    statistics: Mapping[str, tuple[InputStatistics, ...]]
    """Projection of the experts, such as `up_proj` -> statistics of each expert's inputs."""
    counts: list[int]
    """Number of tokens that the router sends to each expert."""
    rare: list[int]
    """Experts that were measured on all tokens, because too few are routed to them."""


class LayerRunner:
    """Runs a Transformer one layer at a time and measures layers' inputs; equal layers share compiled programs.

    Args:
      dtype: dtype of the computation.
      rules: sharding rules of the mesh; None: one device.
      on_host: True keeps the hidden states in host memory between two layers.
    """

    def __init__(self, dtype: jax.typing.DTypeLike, rules: AxisRules | None = None, *, on_host: bool = False):
        self._dtype = dtype
        self._rules = rules
        self._on_host = on_host
        self._embed = jax.jit(self._embed_tokens, static_argnames=("graphdef", "structure", "absent"))
        self._apply = jax.jit(self._apply_layer, static_argnames="graphdef", donate_argnames="x")
        self._measure = jax.jit(self._add_statistics, static_argnames=("graphdef", "needs"), donate_argnames="sums")
        self._measure_experts = jax.jit(
            self._add_expert_statistics, static_argnames=("graphdef", "mixture", "needs"), donate_argnames="sums"
        )
        self._measure_expert = jax.jit(
            self._add_statistics_of_expert, static_argnames=("graphdef", "mixture", "needs"), donate_argnames="sums"
        )
        self._measure_head = jax.jit(
            self._add_head_statistics, static_argnames=("graphdef", "needs"), donate_argnames="sums"
        )
        self._errors = jax.jit(self._sublayer_errors, static_argnames=("graphdef", "sublayer", "change"))

    def embed(self, model: Transformer, batches: Sequence[Mapping[str, Any]]) -> list[Batch]:
        """Compute the inputs of the first Transformer layer for batches of calibration text.

        Args:
          model: the model; its layers and head may be shapes.
          batches: `tokens` [B, T] int32, and with packing `positions` and `segment_ids` [B, T].

        Raises:
          ConfigError: layers of the model read more than the residual stream.
        """
        model.config.check_independent_layers("calibration", "use a method without it, such as rtn")
        graphdef, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        absent = tuple(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in leaves)
        arrays = [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        static = {"graphdef": graphdef, "structure": structure, "absent": absent}
        found = []
        for batch in batches:
            options = {name: jnp.asarray(batch[name]) for name in ("positions", "segment_ids") if name in batch}
            x, context = self._embed(arrays, jnp.asarray(batch["tokens"]), options, **static)
            found.append(Batch(self._kept(x), context))
        return found

    def apply(self, block: Block, batches: Sequence[Batch]) -> list[Batch]:
        """Run a Transformer layer on each batch and return its outputs; the inputs' buffers are donated."""
        graphdef, state = nnx.split(block)
        return [batch._replace(x=self._kept(self._apply(graphdef, state, *batch))) for batch in batches]

    def _kept(self, x: jax.Array) -> Any:
        return np.asarray(x) if self._on_host else x

    def measure(
        self, block: Block, batches: Sequence[Batch], needs: Mapping[str, frozenset[Statistic]]
    ) -> dict[str, InputStatistics]:
        """Measure statistics of the inputs of a Transformer layer's dense layers over all batches.

        Args:
          needs: dense layer by its path in the block, such as `mlp/up_proj` -> statistics wanted.
        """
        sources = {path: input_source(path) for path in needs}
        joined = {source: frozenset[Statistic]() for source in sources.values()}
        for path, source in sources.items():
            joined[source] |= needs[path]
        graphdef, state = nnx.split(block)
        sums: Sums = {}
        for batch in batches:
            sums = self._measure(graphdef, state, *batch, sums=sums, needs=_hashable(joined))
        found = _finish(sums, batches)
        return {path: found[source] for path, source in sources.items() if source in found}

    def measure_experts(
        self,
        block: Block,
        batches: Sequence[Batch],
        mixture: str,
        needs: Mapping[str, frozenset[Statistic]],
        fewest: int = 0,
    ) -> MeasuredExperts:
        """Measure statistics of the inputs of a mixture's experts over all batches.

        Args:
          mixture: path of the mixture in the block, such as `mlp`.
          needs: projection of the experts, such as `up_proj` -> statistics wanted.
          fewest: an expert with fewer routed tokens is measured on all tokens, as if the router sent each to it.
        """
        graphdef, state = nnx.split(block)
        options = {"graphdef": graphdef, "mixture": mixture, "needs": _hashable(needs)}
        sums: Sums = {}
        counts: Any = 0
        for batch in batches:
            sizes, sums = self._measure_experts(state=state, x=batch.x, context=batch.context, sums=sums, **options)
            counts = counts + np.asarray(sizes)
        rare = [expert for expert, count in enumerate(counts) if count < fewest]
        found = {
            name: [_statistics(int(n), {key: x[expert] for key, x in sum.items()}) for expert, n in enumerate(counts)]
            for name, sum in sums.items()
        }
        del sums
        for expert in rare:
            alone: Sums = {}
            for batch in batches:
                alone = self._measure_expert(
                    state=state, x=batch.x, context=batch.context, sums=alone, expert=jnp.int32(expert), **options
                )
            for name, statistics in _finish(alone, batches).items():
                found[name][expert] = statistics
        return MeasuredExperts({name: tuple(each) for name, each in found.items()}, counts.tolist(), rare)

    def measure_head(
        self, model: Transformer, batches: Sequence[Batch], needs: frozenset[Statistic]
    ) -> InputStatistics:
        """Measure statistics of the output head's inputs, given the outputs of the last layer."""
        graphdef, state = nnx.split(model.final_norm)
        sums: Sums = {}
        for batch in batches:
            sums = self._measure_head(graphdef, state, batch.x, sums=sums, needs=_hashable({"head": needs}))
        return _finish(sums, batches)["head"]

    def calibration_block(
        self,
        model: Transformer,
        block: Block,
        batches: Sequence[Batch],
        layouts: Mapping[str, MatrixLayout],
        statistics: Mapping[str, LayerStatistics],
        methods: Mapping[str, AfterTraining],
    ) -> CalibrationBlock:
        """Bundle a layer's weights and input statistics for methods that rescale several of its weights together."""
        graphdef, state = nnx.split(block)

        def output_errors(sublayer: Sublayer, change: Change, candidates: jax.Array) -> jax.Array:
            errors = [
                self._errors(graphdef, state, *batch, candidates=candidates, sublayer=sublayer, change=change)
                for batch in batches
            ]
            return jnp.mean(jnp.stack(errors), axis=0)

        return CalibrationBlock(model.config, weights_by_path(state), layouts, statistics, methods, output_errors)

    def _sharded(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._rules is None else logical_axis_rules(self._rules)

    def _merge(self, graphdef: nnx.GraphDef, state: Weights) -> Block:
        block: Block = nnx.merge(graphdef, gather_weights(state, self._dtype))
        block.chunked_width = None  # the inputs inside a loop over chunks cannot be read
        return block

    def _embed_tokens(
        self,
        arrays: Sequence[jax.Array | None],
        tokens: jax.Array,
        options: Mapping[str, jax.Array],
        *,
        graphdef: nnx.GraphDef,
        structure: Any,
        absent: Sequence[jax.ShapeDtypeStruct | None],
    ) -> tuple[jax.Array, Context]:
        state = structure.unflatten([shape if x is None else x for x, shape in zip(arrays, absent, strict=True)])
        with self._sharded():
            return nnx.merge(graphdef, state).inputs_of_layers(tokens, **options)

    def _apply_layer(self, graphdef: nnx.GraphDef, state: Weights, x: jax.Array, context: Context) -> jax.Array:
        with self._sharded():
            return self._merge(graphdef, state)(x, context)[0]

    def _inputs(
        self, block: Block, x: jax.Array, context: Context, paths: Sequence[str]
    ) -> dict[str, Float[Array, "tokens in"]]:
        """Return the inputs of a block's dense layers `paths`, by path. The block is modified, so discard it."""
        found: dict[str, jax.Array] = {}
        layers = dense_layers(block)
        for path in paths:
            layers[path].dot_general = _Recorder(found, path)
        block(x, context)
        return found

    def _sublayer_inputs(self, block: Block, x: jax.Array, context: Context, sublayer: Sublayer) -> jax.Array:
        """Return the input of a sublayer, [B, T, D]. The block is modified, so discard it."""
        if sublayer in mixtures(block):
            return route_tokens(block, sublayer, x, context).inputs
        source = SUBLAYER_INPUT[sublayer]
        return self._inputs(block, x, context, [source])[source].reshape(x.shape)

    def _add_statistics(
        self, graphdef: nnx.GraphDef, state: Weights, x: jax.Array, context: Context, sums: Sums, *, needs: Needs
    ) -> Sums:
        with self._sharded():
            inputs = self._inputs(self._merge(graphdef, state), x, context, [path for path, _ in needs])
            return _add(sums, {path: _token_sums(inputs[path], wanted) for path, wanted in needs})

    def _routed(
        self, graphdef: nnx.GraphDef, state: Weights, x: jax.Array, context: Context, path: str
    ) -> tuple[MoE, RoutedTokens]:
        """Return a mixture of a layer with its weights, and its inputs with the choice of its router."""
        with self._sharded():
            tokens = route_tokens(self._merge(graphdef, state), path, x, context)
        return mixtures(self._merge(graphdef, state))[path], tokens

    def _add_expert_statistics(
        self,
        *,
        graphdef: nnx.GraphDef,
        state: Weights,
        x: jax.Array,
        context: Context,
        sums: Sums,
        mixture: str,
        needs: Needs,
    ) -> tuple[Int[Array, " E"], Sums]:
        """Return how many of the tokens each expert gets, and the sums with those over its inputs added."""
        experts, tokens = self._routed(graphdef, state, x, context, mixture)
        rows = expert_rows(experts, tokens)  # outside of `_sharded`, whose shard_map would keep the rows
        new: Sums = {name: dict(expert_sums(rows[name], wanted)) for name, wanted in needs}
        return rows["up_proj"].sizes, _add(sums, new)

    def _add_statistics_of_expert(
        self,
        *,
        graphdef: nnx.GraphDef,
        state: Weights,
        x: jax.Array,
        context: Context,
        sums: Sums,
        expert: Int[Array, ""],
        mixture: str,
        needs: Needs,
    ) -> Sums:
        """Return the sums with those over the inputs of one expert added, with all tokens sent to it."""
        experts, tokens = self._routed(graphdef, state, x, context, mixture)
        chosen = jnp.broadcast_to(expert, (*tokens.experts.shape[:2], 1))
        rows = expert_rows(experts, tokens._replace(experts=chosen))
        return _add(sums, {name: _token_sums(rows[name].rows, wanted) for name, wanted in needs})

    def _add_head_statistics(
        self, graphdef: nnx.GraphDef, state: Weights, x: jax.Array, sums: Sums, *, needs: Needs
    ) -> Sums:
        with self._sharded():
            norm = nnx.merge(graphdef, state)
            inputs = norm(x).reshape(-1, x.shape[-1])
            return _add(sums, {path: _token_sums(inputs, wanted) for path, wanted in needs})

    def _sublayer_errors(
        self,
        graphdef: nnx.GraphDef,
        state: Weights,
        x: jax.Array,
        context: Context,
        candidates: jax.Array,
        *,
        sublayer: Sublayer,
        change: Change,
    ) -> Float[Array, " n"]:
        """Return for each candidate the mean squared change of a sublayer's output when `change` replaces weights."""

        def run(state: Weights, inputs: jax.Array) -> jax.Array:
            block = self._merge(graphdef, state)
            assert block.attention is not None and block.mlp is not None
            out = block.attention(inputs, context) if sublayer == "attention" else block.mlp(inputs)
            return (out[0] if isinstance(out, tuple) else out).astype(jnp.float32)

        with self._sharded():
            inputs = self._sublayer_inputs(self._merge(graphdef, state), x, context, sublayer)
            reference = run(state, inputs)
            weights = weights_by_path(state)

            def error(candidate: jax.Array) -> jax.Array:
                changed = replace_weights(state, change(weights, candidate))
                return jnp.mean(jnp.square(run(changed, inputs) - reference))

            return jax.lax.map(error, candidates)


class _Recorder:
    """A `dot_general` that also records its first operand, the input of a dense layer.

    Args:
      found: receives the operand as [tokens, in], under `path`.
    """

    def __init__(self, found: dict[str, jax.Array], path: str):
        self._found = found
        self._path = path

    def __call__(self, x: jax.Array, kernel: jax.Array, dims: Any, *rest: Any, **options: Any) -> jax.Array:
        width = math.prod(x.shape[dim] for dim in dims[0][0])
        self._found[self._path] = x.reshape(-1, width)
        return jax.lax.dot_general(x, kernel, dims, *rest, **options)


def layers_in_order(stack: Stack) -> Iterator[tuple[int, Block]]:
    """Yield (number, block) of each Transformer layer in forward order; stacks of layers are split into single ones."""
    places = sorted(
        (number, index, row)
        for index in range(len(stack.layers))
        for row, number in enumerate(stack.layer_numbers(index))
    )
    for number, index, row in places:
        block = stack.layers[index]
        yield number, unstack_block(block, row) if index in stack.scanned else block


def dense_layers(block: nnx.Module) -> dict[str, Linear]:
    """Return the dense layers of a Transformer layer by path, such as `mlp/up_proj`."""
    found = ((path, node) for path, node in nnx.iter_modules(block) if isinstance(node, Linear))
    return {"/".join(map(str, path)): node for path, node in found}


def input_source(path: str) -> str:
    """Return the dense layer that is measured in place of `path` because it has the same input: q_proj for k_proj."""
    head, _, name = path.rpartition("/")
    return "/".join(part for part in (head, SAME_INPUT.get(name, name)) if part)


def weights_by_path(state: Weights) -> dict[str, jax.Array]:
    """Return the weights of a Transformer layer by path, such as `mlp/up_proj/kernel`."""
    return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


def replace_weights(state: Weights, changes: Mapping[str, Any]) -> Weights:
    """Return a layer's parameters with those at the paths in `changes` replaced by its values."""
    flat = [(path, "/".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(state)]
    if unknown := changes.keys() - {name for _, name, _ in flat}:
        raise KeyError(f"no weight {sorted(unknown)[0]!r}; there are {[name for _, name, _ in flat]}.")
    return nnx.from_flat_state([(path, v.replace(changes[name]) if name in changes else v) for path, name, v in flat])


def _hashable(needs: Mapping[str, frozenset[Statistic]]) -> Needs:
    return tuple((path, tuple(sorted(wanted))) for path, wanted in sorted(needs.items()) if wanted)


def _token_sums(x: Float[Array, "tokens in"], wanted: Sequence[Statistic]) -> dict[Statistic, jax.Array]:
    """Return the `wanted` sums over tokens of a dense layer's input x: of x x^T, of |x|, or of x^2; float32."""
    sums: dict[Statistic, jax.Array] = {}
    if "hessian" in wanted:
        # Products of bfloat16 values are exact in float32.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        sums["hessian"] = jax.lax.dot_general(
            x, x, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
    x = x.astype(jnp.float32)
    if "mean_abs" in wanted:
        sums["mean_abs"] = jnp.sum(jnp.abs(x), axis=0)
    if "square_sum" in wanted:
        sums["square_sum"] = jnp.sum(jnp.square(x), axis=0)
    return sums


def _add(sums: Sums, new: Sums) -> Sums:
    return jax.tree.map(jnp.add, sums, new) if sums else new


def _finish(sums: Sums, batches: Sequence[Batch]) -> dict[str, InputStatistics]:
    """Turn sums over all calibration tokens into the statistics of the inputs of dense layers."""
    count = sum(math.prod(batch.x.shape[:2]) for batch in batches)
    return {path: _statistics(count, found) for path, found in sums.items()}


def _statistics(count: int, sums: Mapping[Statistic, jax.Array]) -> InputStatistics:
    """Turn the sums over `count` inputs of a layer, which may be none, into their statistics."""
    whole = max(count, 1)
    factors: dict[Statistic, float] = {"hessian": 2 / whole, "mean_abs": 1 / whole, "square_sum": 1.0}
    return InputStatistics(count, **{name: total * factors[name] for name, total in sums.items()})
