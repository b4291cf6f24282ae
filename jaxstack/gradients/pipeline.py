"""Gradients of a global batch by pipeline parallelism: microbatches pass through the stages of a pipeline.

One `shard_map` over all axes but `tensor`: every device runs the schedule on its stage and its part of the batch.
Embedding and head belong to no stage. They are sharded over `pipeline` (and `fsdp`), gathered once a step in the
compute dtype, used by the first and the last stage, and their gradients are reduce-scattered once a step, which also
sums those of tied weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxstack.errors import ConfigError
from jaxstack.gradients.microbatches import GradientSums
from jaxstack.gradients.noise import check_noise_layout
from jaxstack.loss import Batch, Loss, LossSum, MeanLoss, add_layer_losses
from jaxstack.models import Transformer
from jaxstack.models.layer_sums import LayerSums
from jaxstack.models.stages import (
    inputs_of_layers,
    is_stacked,
    loss_of_outputs,
    make_repetition_function,
    shared_inputs,
)
from jaxstack.module_arrays.module import Dict
from jaxstack.module_arrays.pipeline_order import StagedArrays
from jaxstack.parallel.pipeline.execute import StageFunctions, execute
from jaxstack.parallel.pipeline.schedule import Schedule, forward_only
from jaxstack.parallel.rules import is_cast, restrict
from jaxstack.parallel.sharding_context import ShardingContext, TracedParameters
from jaxstack.parallel.static_leaves import split_arrays
from jaxstack.parallel.weight_gather import Dims, dims_of, on_tensor_shards
from jaxstack.precision import ScalingState

Result = TypeVar("Result")
State = TypeVar("State")


class PipelinedGradients:
    """Gradients of a Transformer by pipeline parallelism; implements the interface `Gradients`.

    Args:
      module: laid out for the stages of the plan.
      loss: a loss that returns a `LossSum`.
      context: the rules, and the layout with its `pipeline`.

    Raises:
      ConfigError: the model has other variables than its parameters and the scales of FP8.
      TypeError: the loss returns a mean.
    """

    def __init__(self, module: StagedArrays, loss: Loss, context: ShardingContext):
        scaling, others = module.split_scaling(module.abstract_non_params)
        if jax.tree.leaves(others):
            raise ConfigError(
                "parallel.pipeline trains models whose only variables are their parameters and FP8's scales; this one "
                f"has others ({', '.join(sorted(others))}), such as running statistics. Set parallel.pipeline=1."
            )
        rules = context.rules
        plan = context.layout.pipeline
        assert plan is not None
        self._module = module
        self._context = context
        self._rules = rules
        self._plan = plan
        self._loss = loss
        self._split = ("pipeline", *rules.batch_axes)
        # Experts are never gathered, not even those of a layer that runs with the head.
        self._end_axes = tuple(axis for axis in self._split if axis != "expert")
        self._manual = [a for a in rules.mesh.axis_names if a != "tensor" or rules.mesh.shape[a] == 1]
        stored = module.parameter_specs(rules, context.layout.zero)

        def is_spec(x):
            return isinstance(x, PartitionSpec)

        self._specs = jax.tree.map(lambda spec: restrict(spec, self._split), stored, is_leaf=is_spec)
        self._trained_specs = module.split_frozen(self._specs)[0]
        stacked = PartitionSpec("pipeline")
        of_one = PartitionSpec()
        self._scale_specs = jax.tree.map(lambda x: stacked if x.ndim == 3 else of_one, module.abstract_non_params)

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        if noise:
            check_noise_layout(self._plan.microbatches, self._rules.mesh.shape)
        schedule = self._plan.table()
        specs = self._trained_specs
        module = self._module

        def local(params: Dict, non_params: Dict, batch: Batch, key: jax.Array) -> tuple[GradientSums, Dict]:
            axes = self._rules.batch_axes
            key = jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
            (gradients, maxima), loss = self._run(schedule, params, non_params, batch, key)
            gradients = jax.tree.map(self._sum, module.split_frozen(gradients)[0], specs)
            maxima = jax.tree.map(self._largest, maxima, self._scale_specs)
            loss = jax.lax.psum(loss, self._split)
            sums = GradientSums(gradients, loss.total, loss.count, further=loss.further)
            return sums, module.renew_scaling(non_params, maxima)

        whole: Any = PartitionSpec()  # a spec in the place of an array
        out_specs = (GradientSums(specs, whole, whole, further=whole), self._scale_specs)
        return self._on_own_parts(local, out_specs, params, non_params, batch, key)

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a batch for evaluation."""
        shards = self._rules.degree(self._rules.table["batch"])
        rows = next(iter(batch.values())).shape[0] // shards
        count = max(m for m in range(1, self._plan.microbatches + 1) if rows % m == 0)
        schedule = forward_only(self._plan.stages, count, self._plan.chunks)

        def local(params: Dict, non_params: Dict, batch: Batch) -> LossSum:
            return jax.lax.psum(self._run(schedule, params, non_params, batch, None)[1], self._split)

        return self._on_own_parts(local, PartitionSpec(), params, non_params, batch)

    def _on_own_parts(
        self,
        function: Callable[..., Result],
        out_specs: Any,
        params: Dict,
        non_params: Dict,
        batch: Batch,
        *key: jax.Array,
    ) -> Result:
        """Run `function` in a `shard_map` on each device's shards of parameters and batch."""
        parts = {name: restrict(self._rules.batch_spec(x.shape, name), self._split) for name, x in batch.items()}
        return jax.shard_map(
            function,
            mesh=self._rules.mesh,
            in_specs=(self._specs, self._scale_specs, parts, *(PartitionSpec() for _ in key)),
            out_specs=out_specs,
            axis_names=set(self._manual),
            check_vma=False,
        )(params, non_params, dict(batch), *key)

    def _run(
        self, schedule: Schedule, params: Dict, non_params: Dict, batch: Batch, key: jax.Array | None
    ) -> tuple[Any, LossSum]:
        """Run a pipeline schedule on this device's part of the batch; return gradients and loss.

        Returns:
          (gradients of this device's shards, FP8 amax values), or None without a key, in evaluation; the loss of this
          device alone.
        """
        context = self._context.within(self._manual)
        model = self._module.merge_stage(params, non_params)
        graph, layers, ends, others = nnx.split(model, is_stacked, (nnx.Param, ScalingState), ...)
        dtype = model.dtype
        with context.entered():
            layers = _map_parameters(lambda p: _gathered(p, context, ("data",), dtype), layers)
            ends = _map_parameters(lambda p: _gathered(p, context, self._end_axes, dtype), ends)
        parts = (graph, (layers, ends), others)
        functions = _Functions(parts, self._loss, batch, key, schedule.microbatches, context)
        totals = execute(schedule, self._module.layout, functions.stages(), layers, ends, unroll=self._module.unrolled)
        loss = add_layer_losses(LossSum(totals.loss, *totals.others), totals.own)
        if totals.layers is None:
            return None, loss
        with context.entered():
            layers = totals.layers
            if context.layout.zero < 2:  # with ZeRO 2 `_sum_layer` has scattered them
                layers = _map_parameters(lambda p: _scattered(p, context, ("data",)), layers)
            ends = _map_parameters(lambda p: _scattered(p, context, self._end_axes), totals.ends)
        found = self._module.split_stage(nnx.merge(graph, layers, ends, others))
        return found, loss

    def _sum(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Sum a gradient over the mesh axes that replicate its parameter; over sharded axes it is summed already."""
        lacking = self._rules.lacking(spec, self._split)
        return (
            jax.lax.psum(gradient.astype(self._context.layout.reduce_dtype), lacking).astype(jnp.float32)
            if lacking
            else gradient
        )

    def _largest(self, maximum: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return the largest FP8 amax value among the devices that compute the same layer."""
        axes = self._split if spec == PartitionSpec() else self._rules.batch_axes
        return jax.lax.pmax(maximum, axes) if axes else maximum


class _Functions:
    """Functions that a pipeline's stages run on one device's part of a batch: first stage, layer, last stage."""

    def __init__(
        self,
        model: tuple[Any, Any, Any],
        loss: Loss,
        batch: Batch,
        key: jax.Array | None,
        microbatches: int,
        context: ShardingContext,
    ):
        self._model = model
        self._loss = loss
        self._key = key
        self._train = key is not None
        self._pieces = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
        gathered = frozenset(["pipeline"])
        self._layer_context = dataclasses.replace(context, parameters=TracedParameters(gathered))
        whole = TracedParameters(gathered | set(context.rules.weight_axes))
        self._end_context = dataclasses.replace(context, parameters=whole)
        self._shared_inputs: Any = None

    def stages(self) -> StageFunctions:
        """Return the functions that the pipeline's schedule calls: first stage, layer, last stage."""
        only_lookup = self._merge(None).decoder.scanned.start == 0
        return StageFunctions(
            self._first,
            self._shared,
            self._layer,
            self._last,
            is_lookup=only_lookup,
            sum_layer=self._sum_layer,
            is_maximum=_is_maximum,
        )

    def _first(self, ends: Any, microbatch: jax.Array) -> tuple[jax.Array, LayerSums]:
        with self._end_context.entered():
            x, own = inputs_of_layers(self._merge(ends), self._loss_of(microbatch))
        return x, own if self._train else {}

    def _sum_layer(self, gradients: Any) -> Any:
        """Return a layer's gradients, with ZeRO 2 reduce-scattered over `data`, so that no device stores them whole."""
        context = self._layer_context
        if context.layout.zero < 2:
            return gradients
        return _map_parameters(lambda p: _scattered(p, context, ("data",), row=True), gradients)

    def _last(self, ends: Any, x: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, Any]:
        with self._end_context.entered():
            found = loss_of_outputs(self._merge(ends), self._loss_of(microbatch), x)
        return found.total, (found.count, found.further)

    def _shared(self, microbatch: jax.Array) -> list[jax.Array]:
        with self._end_context.entered():
            found = shared_inputs(self._merge(None), self._loss_of(microbatch))
        arrays, self._shared_inputs = split_arrays(found)  # the other leaves are the same for every microbatch
        return arrays

    def _layer(self, weights: Any, x: jax.Array, shared: list[jax.Array], index: jax.Array) -> Any:
        inputs = self._shared_inputs(shared)
        with self._layer_context.entered():
            x, own = make_repetition_function(self._merge(None))(weights, x, inputs, index)
        return x, own if self._train else {}  # the layers' losses belong to training alone

    def _merge(self, ends: Any) -> Transformer:
        graph, known, non_params = self._model
        layers, given = known
        return nnx.merge(graph, layers, given if ends is None else ends, non_params)

    def _loss_of(self, microbatch: jax.Array) -> Callable[[Transformer], LossSum]:
        """Return a function from the model to its loss on one microbatch."""
        piece = {name: jax.lax.dynamic_index_in_dim(x, microbatch, 0, False) for name, x in self._pieces.items()}
        key = None if self._key is None else jax.random.fold_in(self._key, microbatch)

        def loss(model: Transformer) -> LossSum:
            try:
                return self._loss(model, piece, key=key, train=self._train, part=True)
            except MeanLoss:
                raise TypeError(
                    "in a pipeline the loss function must return a jaxstack.loss.LossSum, which adds up over "
                    "microbatches; it returned a mean."
                ) from None

        return loss


def _map_parameters(change: Callable[[nnx.Param], jax.Array | None], state: State) -> State:
    """Apply a function to the parameters in an NNX state; FP8 scaling states stay the same."""

    def apply(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(change(variable)) if isinstance(variable, nnx.Param) else variable

    return jax.tree.map(apply, state, is_leaf=_is_variable)


def _is_maximum(state: Any) -> Any:
    """Return a tree of flags that is True for the FP8 scaling states, whose gradients are combined by maximum."""

    def flags(v):
        return jax.tree.map(lambda _: isinstance(v, ScalingState), v)

    return jax.tree.map(flags, state, is_leaf=_is_variable)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _splits(parameter: nnx.Variable, context: ShardingContext, axes: Sequence[str]) -> tuple[PartitionSpec, Dims]:
    """Return the sharding in which a parameter is stored, and the dims that `axes` split."""
    known = parameter.get_metadata()
    stored = context.stored_spec(known["logical_axes"], known["whole_shape"])
    return stored, dims_of(stored, axes)


def _gathered(parameter: nnx.Variable, context: ShardingContext, axes: Sequence[str], dtype: DTypeLike) -> jax.Array:
    """All-gather a parameter over mesh axes; a matrix is cast to the compute dtype first.

    A matrix that stays sharded over `weight_axes` is cast where it is used, with its gather.
    """
    rules = context.rules
    x = parameter[...]
    known = parameter.get_metadata()
    stored, splits = _splits(parameter, context, axes)
    shard = not set(rules.weight_axes) <= set(axes) and bool(dims_of(stored, rules.weight_axes))
    if is_cast(known["logical_axes"], known["whole_shape"], known) and (splits or not shard):
        x = x.astype(dtype)

    def gather(x: jax.Array) -> jax.Array:
        for own, dim in splits:
            x = jax.lax.all_gather(x, own, axis=dim, tiled=True)
        return x

    return on_tensor_shards(gather, stored, rules)(x) if splits else x


def _scattered(
    parameter: nnx.Variable, context: ShardingContext, axes: Sequence[str], row: bool = False
) -> jax.Array | None:
    """Reduce-scatter a gradient over the mesh axes along which its parameter was gathered; None stays None.

    Args:
      parameter: the variable.
      context: the rules and the layout inside the `shard_map`.
      axes: mesh axes that the parameter was gathered over.
      row: True if the gradient is that of one of the parameter's stacked layers.
    """
    gradient = parameter.get_raw_value()
    stored, splits = _splits(parameter, context, axes)
    if row:
        stored = PartitionSpec(*stored[1:])
        splits = tuple((own, dim - 1) for own, dim in splits)

    def scatter(x: jax.Array) -> jax.Array:
        x = x.astype(context.layout.reduce_dtype)
        for own, dim in splits:
            x = jax.lax.psum_scatter(x, own, scatter_dimension=dim, tiled=True)
        return x.astype(jnp.float32)

    return on_tensor_shards(scatter, stored, context.rules)(gradient) if splits and gradient is not None else gradient
