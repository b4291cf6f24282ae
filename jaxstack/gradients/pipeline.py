"""Sums of loss, weight and gradients over a global batch whose microbatches go through the stages of a pipeline.

One `shard_map` over all axes but `tensor`: every device runs the schedule on its stage and its part of the batch.
Embedding and head belong to no stage. They are stored in parts over `pipeline` (and `fsdp`), made whole once a step in
the compute dtype, used by the first and the last stage, and their gradients are scattered once a step, which also adds
up those of tied weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxstack.errors import ConfigError
from jaxstack.gradients.microbatches import Batch, LossFunction, Sums, takes_key
from jaxstack.gradients.pipeline_module import StagedModule
from jaxstack.loss import LossSum
from jaxstack.models import Transformer
from jaxstack.models.stages import inputs_of_layers, is_stacked, loss_of_outputs, repetition_of, shared_inputs
from jaxstack.parallel.exchange import Dims
from jaxstack.parallel.pipeline.execute import StageFunctions, execute
from jaxstack.parallel.pipeline.plan import PipelinePlan
from jaxstack.parallel.pipeline.schedule import Schedule, forward_only
from jaxstack.parallel.rules import AxisRules, is_cast, logical_axis_rules, restrict
from jaxstack.parallel.weights import beside_tensor, dims_of
from jaxstack.precision.recipe import ScalingState


class PipelinedGradients:
    """Runs a Transformer in stages; see `jaxstack.gradients.microbatches.Gradients`.

    Args:
      module: laid out for the stages of `plan`.
      loss: `loss(model, batch)` or `loss(model, batch, key)`, a `LossSum`.

    Raises:
      ConfigError: the model has variables beside its parameters and the scales of FP8.
    """

    def __init__(self, module: StagedModule, loss: LossFunction, rules: AxisRules, plan: PipelinePlan):
        scaling, others = module.split_scaling(module.abstract_non_params)
        if jax.tree.leaves(others):
            raise ConfigError(
                "parallel.pipeline trains models whose only variables are their parameters and FP8's scales; this one "
                f"has others ({', '.join(sorted(others))}), such as running statistics. Set parallel.pipeline=1."
            )
        self._module, self._rules, self._plan = module, rules, plan
        self._loss = loss if takes_key(loss) else lambda model, batch, key: loss(model, batch)
        self._split = ("pipeline", *rules.batch_axes)
        # Experts stay where they are, also those of a layer that runs with the head.
        self._of_ends = tuple(axis for axis in self._split if axis != "expert")
        self._taken = [a for a in rules.mesh.axis_names if a != "tensor" or rules.mesh.shape[a] == 1]
        stored = module.parameter_specs(rules)
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        self._specs = jax.tree.map(lambda spec: restrict(spec, self._split), stored, is_leaf=is_spec)
        self._trained_specs = module.split_frozen(self._specs)[0]
        stacked, of_one = PartitionSpec("pipeline"), PartitionSpec()
        self._rest_specs = jax.tree.map(lambda x: stacked if x.ndim == 3 else of_one, module.abstract_non_params)

    def __call__(self, params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        schedule, specs, module = self._plan.table(), self._trained_specs, self._module

        def local(params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            axes = self._rules.batch_axes
            key = jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
            (gradients, maxima), loss, weight = self._run(schedule, params, non_params, batch, key)
            gradients = jax.tree.map(self._sum, module.split_frozen(gradients)[0], specs)
            maxima = jax.tree.map(self._largest, maxima, self._rest_specs)
            sums = Sums(gradients, *jax.lax.psum((loss, weight), self._split))
            return sums, module.renew_scaling(non_params, maxima)

        whole: Any = PartitionSpec()
        out_specs = (Sums(specs, whole, whole), self._rest_specs)
        return self._on_own_parts(local, out_specs, params, non_params, batch, key)

    def loss(self, params: Any, non_params: Any, batch: Batch) -> LossSum:
        """The loss sum and weight of a batch, without gradients and random key."""
        shards = self._rules.degree(self._rules.table["batch"])
        rows = next(iter(batch.values())).shape[0] // shards
        count = max(m for m in range(1, self._plan.microbatches + 1) if rows % m == 0)
        schedule = forward_only(self._plan.stages, count, self._plan.chunks)

        def local(params: Any, non_params: Any, batch: Batch) -> LossSum:
            _, loss, weight = self._run(schedule, params, non_params, batch, None)
            return LossSum(*jax.lax.psum((loss, weight), self._split))

        return self._on_own_parts(local, PartitionSpec(), params, non_params, batch)

    def _on_own_parts(
        self, function: Any, out_specs: Any, params: Any, non_params: Any, batch: Batch, *key: Any
    ) -> Any:
        parts = {name: restrict(self._rules.batch_spec(x.shape, name), self._split) for name, x in batch.items()}
        return jax.shard_map(
            function,
            mesh=self._rules.mesh,
            in_specs=(self._specs, self._rest_specs, parts, *(PartitionSpec() for _ in key)),
            out_specs=out_specs,
            axis_names=set(self._taken),
            check_vma=False,
        )(params, non_params, dict(batch), *key)

    def _run(
        self, schedule: Schedule, params: Any, non_params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[Any, jax.Array, jax.Array]:
        """((gradients of this device's shards, maxima for FP8's scales) or None, loss, weight) of this device alone."""
        rules = self._rules.within(self._taken)
        model = self._module.merge_stage(params, non_params)
        graph, layers, ends, others = nnx.split(model, is_stacked, (nnx.Param, ScalingState), ...)
        dtype = model.dtype
        with logical_axis_rules(rules):
            layers = _map_parameters(lambda p: _gathered(p, rules, ("data",), dtype), layers)
            ends = _map_parameters(lambda p: _gathered(p, rules, self._of_ends, dtype), ends)
        parts = (graph, (layers, ends), others)
        functions = _Functions(parts, self._loss, batch, key, schedule.microbatches, rules)
        totals = execute(schedule, self._module.layout, functions.stages(), layers, ends, unroll=self._module.unrolled)
        if totals.layers is None:
            return None, totals.loss, totals.weight
        with logical_axis_rules(rules):
            layers = totals.layers
            if rules.zero < 2:  # else scattered as they were made
                layers = _map_parameters(lambda p: _scattered(p, rules, ("data",)), layers)
            ends = _map_parameters(lambda p: _scattered(p, rules, self._of_ends), totals.ends)
        found = self._module.split_stage(nnx.merge(graph, layers, ends, others))
        return found, totals.loss, totals.weight

    def _sum(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The sum over the axes along which the parameter is whole; over the others it was summed already."""
        lacking = self._rules.lacking(spec, self._split)
        return jax.lax.psum(gradient.astype(self._rules.reduce), lacking).astype(jnp.float32) if lacking else gradient

    def _largest(self, maximum: jax.Array, spec: PartitionSpec) -> jax.Array:
        """That of all devices; of stacked layers those along `pipeline` have others."""
        axes = self._split if spec == PartitionSpec() else self._rules.batch_axes
        return jax.lax.pmax(maximum, axes) if axes else maximum


class _Functions:
    """The `StageFunctions` of one device's part of a batch."""

    def __init__(
        self,
        model: tuple[Any, Any, Any],
        loss: LossFunction,
        batch: Batch,
        key: jax.Array | None,
        microbatches: int,
        rules: AxisRules,
    ):
        self._model, self._loss, self._key = model, loss, key
        self._pieces = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
        self._layer_rules = dataclasses.replace(rules, gathered=frozenset(["pipeline"]))
        self._end_rules = dataclasses.replace(rules, gathered=frozenset(["pipeline", *rules.weight_axes]))
        self._context: Any = None

    def stages(self) -> StageFunctions:
        alone = self._merge(None).decoder.scanned.start == 0
        return StageFunctions(
            self._first,
            self._shared,
            self._layer,
            self._last,
            is_lookup=alone,
            sum_layer=self._sum_layer,
            is_maximum=_is_maximum,
        )

    def _first(self, ends: Any, microbatch: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        with logical_axis_rules(self._end_rules):
            x, own = inputs_of_layers(self._merge(ends), self._loss_of(microbatch))
        return x, own if self._key is not None else None

    def _sum_layer(self, gradients: Any) -> Any:
        """With ZeRO-2 the gradients of a layer in parts over `data`, so that no stage ever has all of them whole."""
        rules = self._layer_rules
        if rules.zero < 2:
            return gradients
        return _map_parameters(lambda p: _scattered(p, rules, ("data",), row=True), gradients)

    def _last(self, ends: Any, x: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, jax.Array]:
        with logical_axis_rules(self._end_rules):
            found = loss_of_outputs(self._merge(ends), self._loss_of(microbatch), x)
        if not isinstance(found, LossSum):
            raise TypeError("in a pipeline the loss function must return a jaxstack.loss.LossSum, which adds up.")
        return found.total.astype(jnp.float32), found.weight.astype(jnp.float32)

    def _shared(self, microbatch: jax.Array) -> list[jax.Array]:
        with logical_axis_rules(self._end_rules):
            found = shared_inputs(self._merge(None), self._loss_of(microbatch))
        leaves, structure = jax.tree.flatten(found)
        # Flags among them are for Python, and the same for every microbatch.
        self._context = structure, [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def _layer(self, weights: Any, x: jax.Array, shared: list[jax.Array], index: jax.Array) -> Any:
        structure, leaves = self._context
        arrays = iter(shared)
        inputs = jax.tree.unflatten(structure, [next(arrays) if leaf is None else leaf for leaf in leaves])
        with logical_axis_rules(self._layer_rules):
            x, own = repetition_of(self._merge(None))(weights, x, inputs, index)
        return x, own if self._key is not None else None  # routers' losses are for training alone

    def _merge(self, ends: Any) -> Transformer:
        graph, known, non_params = self._model
        layers, given = known
        return nnx.merge(graph, layers, given if ends is None else ends, non_params)

    def _loss_of(self, microbatch: jax.Array) -> Any:
        piece = {name: jax.lax.dynamic_index_in_dim(x, microbatch, 0, False) for name, x in self._pieces.items()}
        key = None if self._key is None else jax.random.fold_in(self._key, microbatch)
        return lambda model: self._loss(model, piece, key)


def _map_parameters(change: Any, state: Any) -> Any:
    """The state with parameters changed; scaling states stay as they are."""

    def apply(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(change(variable)) if isinstance(variable, nnx.Param) else variable

    return jax.tree.map(apply, state, is_leaf=_is_variable)


def _is_maximum(state: Any) -> Any:
    """For each leaf whether it belongs to a scaling state."""
    flags = lambda v: jax.tree.map(lambda _: isinstance(v, ScalingState), v)  # noqa: E731
    return jax.tree.map(flags, state, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _splits(parameter: nnx.Variable, rules: AxisRules, axes: Sequence[str]) -> tuple[PartitionSpec, Dims]:
    """How a parameter is stored, and along which dims `axes` split it."""
    known = parameter.get_metadata()
    stored = rules.stored_spec(known["logical_axes"], known["whole_shape"])
    return stored, dims_of(stored, axes)


def _gathered(parameter: nnx.Variable, rules: AxisRules, axes: Sequence[str], dtype: Any) -> jax.Array:
    """A matrix in the compute dtype and whole over `axes`, once a step; what is still a shard is cast when gathered."""
    x, known = parameter[...], parameter.get_metadata()
    stored, splits = _splits(parameter, rules, axes)
    shard = not set(rules.weight_axes) <= set(axes) and bool(dims_of(stored, rules.weight_axes))
    if is_cast(known["logical_axes"], known["whole_shape"]) and (splits or not shard):
        x = x.astype(dtype)

    def gather(x: jax.Array) -> jax.Array:
        for own, dim in splits:
            x = jax.lax.all_gather(x, own, axis=dim, tiled=True)
        return x

    return beside_tensor(gather, stored, rules)(x) if splits else x


def _scattered(parameter: nnx.Variable, rules: AxisRules, axes: Sequence[str], row: bool = False) -> Any:
    """The inverse of `_gathered` for a gradient, or None: this device's part of the sum.

    Args:
      row: the gradient is that of one of the stacked layers that the parameter holds.
    """
    gradient = parameter.get_raw_value()
    stored, splits = _splits(parameter, rules, axes)
    if row:
        stored, splits = PartitionSpec(*stored[1:]), tuple((own, dim - 1) for own, dim in splits)

    def scatter(x: jax.Array) -> jax.Array:
        x = x.astype(rules.reduce)
        for own, dim in splits:
            x = jax.lax.psum_scatter(x, own, scatter_dimension=dim, tiled=True)
        return x.astype(jnp.float32)

    return beside_tensor(scatter, stored, rules)(gradient) if splits and gradient is not None else gradient
