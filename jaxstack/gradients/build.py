"""Chooses how the gradients of a global batch are computed, and computes them in one program that XLA partitions."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.gradients.microbatches import Gradients, GradientSums, Microbatches
from jaxstack.gradients.noise import check_noise_layout, estimate_noise, sum_squares
from jaxstack.gradients.pipeline import PipelinedGradients
from jaxstack.gradients.shard_map import LocalGradients
from jaxstack.loss import Batch, Loss, LossFunction, LossSum, MeanLoss, as_loss
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.pipeline_order import StagedArrays
from jaxstack.parallel.sharding_context import ShardingContext, placed
from pallas_kernels.weight_only.packed import is_packed


class GlobalGradients:
    """Gradient computation as one program over the global batch, which XLA's partitioner (GSPMD) splits over devices.

    Batch statistics are those of the whole global batch. With ZeRO 1 and 2 the parameters are gathered over `data`, in
    float32, once a step, and the gradients are scattered after the last microbatch: it is not known where such a module
    uses its parameters, nor in which dtype.
    """

    def __init__(self, microbatches: Microbatches, context: ShardingContext):
        self._microbatches = microbatches
        self._context = context
        self._rules = context.rules
        module = microbatches.module
        zero = context.layout.zero
        self._stored = module.split_frozen(module.parameter_specs(self._rules, zero))[0]
        spec = self._rules.parameter_spec
        self._used = module.map_parameters(lambda names, shape, _: spec(names, shape), self._rules)

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        """Return loss, item count and gradients, summed over the global batch, and updated non-parameter variables."""
        if noise:
            check_noise_layout(self._microbatches.count, self._rules.mesh.shape)
        sums, non_params = self._sums(self._placed(params, self._used), non_params, batch, key, noise)
        return dataclasses.replace(sums, gradients=self._placed(sums.gradients, self._stored)), non_params

    def _placed(self, tree: Dict, specs: Dict) -> Dict:
        """Return the arrays constrained to the given shardings if ZeRO 1 or 2 is on, otherwise unchanged."""
        if not self._context.layout.zero:
            return tree

        def place(x, spec):
            return x if is_packed(x) else jax.lax.with_sharding_constraint(x, placed(self._rules, spec))

        return jax.tree.map(place, tree, specs, is_leaf=is_packed)

    def _sums(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, noise: bool
    ) -> tuple[GradientSums, Dict]:
        rules = self._rules
        context = self._context
        # If rows are split into microbatches, `data` has size 1 or is manual; the batch's other axes still shard them.
        shards = rules.degree([axis for axis in rules.table["batch"] if axis != "data" and axis not in rules.manual])
        if self._microbatches.count == 1 or rules.mesh.shape["data"] == 1:
            with context.entered():
                return self._run(params, non_params, batch, key, shards, noise)

        # `data` is manual here: XLA would otherwise all-reduce gradients over it after every microbatch.
        def replica(params: Dict, non_params: Dict, batch: Batch, key: jax.Array) -> tuple[GradientSums, Dict]:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
            with context.within(["data"]).entered():
                return self._run(params, non_params, batch, key, shards, noise, ("data",))

        whole = PartitionSpec()
        split = PartitionSpec("data")
        return jax.shard_map(
            replica,
            mesh=None if rules.manual else rules.mesh,
            in_specs=(whole, whole, split, whole),
            out_specs=(whole, whole),
            axis_names={"data"},
            check_vma=False,
        )(params, non_params, batch, key)

    def _run(
        self,
        params: Dict,
        non_params: Dict,
        batch: Batch,
        key: jax.Array,
        shards: int,
        noise: bool,
        axes: tuple[str, ...] = (),
    ) -> tuple[GradientSums, Dict]:
        """Return sums of loss, items and gradients, all-reduced over the manual mesh `axes`, and updated variables."""
        measure = sum_squares if noise else None
        sums, non_params, small = self._microbatches(params, non_params, batch, key, shards=shards, measure=measure)
        if axes:
            gradients, loss, count = jax.lax.psum((sums.gradients, sums.loss, sums.count), axes)
            further = jax.lax.psum(sums.further, axes) if sums.further else {}
            sums = dataclasses.replace(sums, gradients=gradients, loss=loss, count=count, further=further)
            non_params = jax.tree.map(_mean_over_data, non_params)
        if small is not None:
            estimate = estimate_noise(*small, sum_squares(sums.gradients), sums.count, axes)
            sums = dataclasses.replace(sums, noise=estimate)
        return self._microbatches.finish(sums, non_params, axes)

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a batch for evaluation."""
        with self._context.entered():
            return self._microbatches.loss(self._placed(params, self._used), non_params, batch, key=None, train=False)[
                0
            ]


def _mean_over_data(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "data") if jnp.issubdtype(x.dtype, jnp.floating) else x


def make_gradients(
    module: ModuleArrays, loss: LossFunction | Loss, context: ShardingContext, accumulation: int = 1
) -> Gradients:
    """Return the object that computes gradients: through pipeline stages, in a `shard_map`, or partitioned by XLA.

    Args:
      module: a `StagedArrays` runs in the stages of a pipeline.
      loss: see `jaxstack.loss`. A mean is computed on the whole batch, as it does not add up over parts of one.
      context: the rules and the layout of the step.
      accumulation: number of microbatches that a batch is split into; a pipeline has its own.
    """
    loss = as_loss(loss)
    if isinstance(module, StagedArrays):
        return PipelinedGradients(module, loss, context)
    microbatches = Microbatches(module, loss, accumulation)
    whole = GlobalGradients(microbatches, context)
    if module.gathers_weights and context.rules.batch_axes:
        parts = Microbatches(module, loss, accumulation, parts=True)
        return LocalOrGlobal(LocalGradients(parts, context), whole)
    return whole


class LocalOrGlobal:
    """Gradients of each device's part of a batch if the loss is a sum, and of the whole batch if it is a mean.

    Which of the two it is shows when the loss function is traced.
    """

    def __init__(self, parts: LocalGradients, whole: GlobalGradients):
        self._parts = parts
        self._whole = whole

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        try:
            return self._parts(params, non_params, batch, key, noise=noise)
        except MeanLoss:
            return self._whole(params, non_params, batch, key, noise=noise)

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        try:
            return self._parts.loss(params, non_params, batch)
        except MeanLoss:
            return self._whole.loss(params, non_params, batch)
