"""Gradients computed by one program over the global batch, which XLA partitions (GSPMD)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.gradients.microbatches import Batch, Microbatches, Sums
from jaxstack.loss import LossSum
from jaxstack.parallel.context import ShardingContext


class GlobalGradients:
    """One program over the global batch, partitioned by XLA: statistics and means are those of all its rows.

    With ZeRO 1 and 2 the parameters are made whole over `data`, in float32, once a step, and the gradients split after
    the last microbatch: in which dtype such a module uses its parameters, and where, is not known here.
    """

    def __init__(self, microbatches: Microbatches, context: ShardingContext):
        self._microbatches, self._context, self._rules = microbatches, context, context.rules
        module, zero = microbatches.module, context.layout.zero
        self._stored = module.split_frozen(module.parameter_specs(self._rules, zero))[0]
        spec = self._rules.parameter_spec
        self._used = module.map_parameters(lambda names, shape, _: spec(names, shape), self._rules)

    def __call__(self, params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        sums, non_params = self._sums(self._placed(params, self._used), non_params, batch, key)
        return sums._replace(gradients=self._placed(sums.gradients, self._stored)), non_params

    def _placed(self, tree: Any, specs: Any) -> Any:
        if not self._context.layout.zero:
            return tree
        place = lambda x, spec: jax.lax.with_sharding_constraint(x, self._rules.sharding(spec))  # noqa: E731
        return jax.tree.map(place, tree, specs)

    def _sums(self, params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        rules, context = self._rules, self._context
        # `data` is either 1 or manual where rows are cut; the batch's other axes still split them.
        shards = rules.degree([axis for axis in rules.table["batch"] if axis != "data"])
        if self._microbatches.count == 1 or rules.mesh.shape["data"] == 1:
            with context.entered():
                return self._microbatches.finish(*self._microbatches(params, non_params, batch, key, shards=shards))

        # `data` is manual here: XLA, left to itself, would reduce gradients over it once a microbatch.
        def replica(params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
            with context.within(["data"]).entered():
                sums, non_params = self._microbatches(params, non_params, batch, key, shards=shards)
            gradients, loss, weight = jax.lax.psum(sums[:3], "data")
            sums = sums._replace(gradients=gradients, loss=loss, weight=weight)
            return self._microbatches.finish(sums, jax.tree.map(_mean_over_data, non_params), ("data",))

        whole, split = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(
            replica,
            mesh=rules.mesh,
            in_specs=(whole, whole, split, whole),
            out_specs=(whole, whole),
            axis_names={"data"},
            check_vma=False,
        )(params, non_params, batch, key)

    def loss(self, params: Any, non_params: Any, batch: Batch) -> LossSum:
        with self._context.entered():
            return self._microbatches.loss(self._placed(params, self._used), non_params, batch, None)[0]


def _mean_over_data(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "data") if jnp.issubdtype(x.dtype, jnp.floating) else x
