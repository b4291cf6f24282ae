"""Gradients that each device computes on its part of the batch, in a `shard_map` over all axes but `tensor`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.gradients.microbatches import GradientSums, Microbatches
from jaxstack.gradients.noise import Group, check_noise_layout, estimate_noise, sum_squares
from jaxstack.loss import Batch, LossSum
from jaxstack.module_arrays.module import Dict
from jaxstack.parallel.rules import Names, is_cast, restrict
from jaxstack.parallel.sharding_context import ShardingContext, TracedParameters
from jaxstack.parallel.weight_gather import (
    Dims,
    Exchange,
    WorkingCopy,
    dims_of,
    exchange_weight,
    on_tensor_shards,
    sum_gradient,
)
from pallas_kernels.weight_only.packed import PackedWeight, is_packed

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class ParameterLayout:
    """Sharding of a parameter during and between steps, and whether the module sums its gradient over devices."""

    spec: PartitionSpec
    """Its layout during a step: `AxisRules.parameter_spec`."""
    stored: PartitionSpec
    """Its layout between steps: with ZeRO 1 and 2 it is split over `data` too."""
    dtype: str
    """Dtype of its working copy, if it is split over `data`."""
    summed_by_module: bool
    """True if the module sums the gradient where it uses the parameter, see `gather_parameter`."""
    stacked: bool
    """True if its first dim is that of stacked layers."""

    def of_one_layer(self) -> "ParameterLayout":
        """Return the layout of one layer of stacked parameters."""
        spec, stored = (PartitionSpec(*tuple(whole)[1:]) for whole in (self.spec, self.stored))
        return dataclasses.replace(self, spec=spec, stored=stored, stacked=False)


class LocalGradients:
    """Gradients that each device computes on its part of the batch, with explicit collectives in a `shard_map`.

    Over the `weight_axes` a gradient is reduce-scattered where its weight was gathered. Over the other axes it is
    summed where the weight is used if there is one microbatch, so that the sum overlaps with the backward pass, and
    otherwise once, after all microbatches. With ZeRO 1 and 2 a working copy in the compute dtype is gathered over
    `data` once a step. Its gradient is reduce-scattered after all microbatches with ZeRO 1, and wherever the weight is
    used with ZeRO 2, so that no device ever holds a whole gradient.

    The loss must add up over parts of a batch: it returns a `LossSum`.
    """

    def __init__(self, microbatches: Microbatches, context: ShardingContext):
        rules = context.rules
        layout = context.layout
        self._microbatches = microbatches
        self._rules = rules
        self._zero = layout.zero
        # A tensor axis of one device is manual too: no axis is then left to XLA, and kernels need no shard_map.
        self._manual = [a for a in rules.free if a != "tensor" or rules.mesh.shape[a] == 1]
        self._split = rules.batch_axes
        self._exchange = Exchange("", layout.reduce_dtype, peer_copies=layout.peer_copies)
        self._sums_at_use = layout.zero == 2 or (layout.zero == 0 and microbatches.count == 1)
        summed = self._split if self._sums_at_use else ()
        self._inner = dataclasses.replace(context.within(self._manual), parameters=TracedParameters(summed=summed))
        self._layouts = microbatches.module.map_parameters(self._layout, rules)
        self._specs = jax.tree.map(lambda x: restrict(x.stored, self._split), self._layouts)
        self._trained_layouts = microbatches.module.split_frozen(self._layouts)[0]
        self._trained_specs = microbatches.module.split_frozen(self._specs)[0]

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        """Return loss, item count and gradients, summed over the global batch, and updated non-parameter variables."""
        groups = None
        measure = None
        if noise:
            check_noise_layout(self._microbatches.count, self._rules.mesh.shape)
            groups = jax.tree.map(self._noise_group, self._trained_layouts)
            measure = functools.partial(sum_squares, groups=groups)

        def local(params: Dict, non_params: Dict, batch: Batch, key: jax.Array) -> tuple[GradientSums, Dict]:
            key = jax.random.fold_in(key, jax.lax.axis_index(self._split))
            copies = self._working_copies(params)
            if self._sums_at_use:

                def prepare(params):
                    return jax.tree.map(self._summing, params, copies, self._layouts, is_leaf=is_packed)

                run = functools.partial(self._microbatches, prepare=prepare, measure=measure)
                sums, non_params, small = run(params, non_params, batch, key)
                gradients = sums.gradients
            else:
                sums, non_params, small = self._microbatches(copies, non_params, batch, key, measure=measure)
                gradients = jax.tree.map(self._sum, sums.gradients, self._trained_layouts)
            loss, count = jax.lax.psum((sums.loss, sums.count), self._split)
            further = jax.lax.psum(sums.further, self._split) if sums.further else {}
            sums = dataclasses.replace(sums, gradients=gradients, loss=loss, count=count, further=further)
            if small is not None:
                estimate = estimate_noise(*small, sum_squares(gradients, groups), count, self._split)
                sums = dataclasses.replace(sums, noise=estimate)
            return self._microbatches.finish(sums, jax.tree.map(self._mean, non_params), self._split)

        whole: Any = PartitionSpec()  # a spec in the place of an array
        noise_spec = whole if noise else None
        out_specs = (GradientSums(self._trained_specs, whole, whole, noise=noise_spec, further=whole), whole)
        return self._on_own_parts(local, out_specs, params, non_params, batch, key)

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a batch for evaluation."""

        def local(params: Dict, non_params: Dict, batch: Batch) -> LossSum:
            copies = self._working_copies(params)
            loss, _ = self._microbatches.loss(copies, non_params, batch, key=None, train=False)
            return jax.lax.psum(loss, self._split)

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
        rules = self._rules

        def local(*arguments: Any) -> Result:
            with self._inner.entered():
                return function(*arguments)

        # Each device holds the whole of a packed weight.
        specs = jax.tree.map(
            lambda x, s: PartitionSpec() if is_packed(x) else s, params, self._specs, is_leaf=is_packed
        )
        parts = {name: restrict(rules.batch_spec(x.shape, name), self._split) for name, x in batch.items()}
        return jax.shard_map(
            local,
            mesh=None if rules.manual else rules.mesh,
            in_specs=(specs, PartitionSpec(), parts, *(PartitionSpec() for _ in key)),
            out_specs=out_specs,
            axis_names=set(self._manual),
            check_vma=False,
        )(params, non_params, dict(batch), *key)

    def _layout(self, names: Names | None, shape: tuple[int, ...], metadata: dict[str, Any]) -> ParameterLayout:
        rules = self._rules
        spec = rules.parameter_spec(names, shape)
        stored = rules.stored_spec(names, shape, self._zero)
        casts = is_cast(names, shape, metadata)
        dtype = self._microbatches.module.dtype if casts else None
        dtype = str(jnp.dtype(dtype or jnp.float32))
        stacked = bool(names) and names[0] == "layers"
        return ParameterLayout(spec, stored, dtype, bool(metadata.get("sum_where_used")), stacked)

    def _working_copies(self, params: Dict) -> Dict:
        """Return the parameters, all-gathered over `data` where it splits them, in the compute dtype.

        Stacked layers are gathered one layer at a time. XLA gathers a whole stack with the devices' parts outermost,
        and copies it into the order of layers after all gathers: the working copy would be in memory twice. All
        matrices of a layer are gathered in one iteration of one loop: XLA's CPU backend runs independent loops
        concurrently, and the program aborts where the collectives of two loops meet.
        """
        weights, tree = jax.tree.flatten(params, is_leaf=is_packed)
        layouts = tree.flatten_up_to(self._layouts)
        stacks: dict[int, dict[int, jax.Array]] = {}
        for index, (weight, layout) in enumerate(zip(weights, layouts, strict=True)):
            if is_packed(weight):
                continue
            if layout.stacked and _data_shards(layout):
                stacks.setdefault(weight.shape[0], {})[index] = weight
            else:
                weights[index] = self._working_copy(weight, layout)
        for stack in stacks.values():

            def gather(layer):
                return {i: self._working_copy(x, layouts[i].of_one_layer()) for i, x in layer.items()}

            for index, copy in jax.lax.map(gather, stack).items():
                weights[index] = copy
        return tree.unflatten(weights)

    def _working_copy(self, x: jax.Array, layout: ParameterLayout) -> jax.Array:
        """Return a parameter all-gathered over `data` in the compute dtype; unchanged if `data` does not split it."""
        parts = _data_shards(layout)
        if not parts:
            return x
        how = self._exchange._replace(dtype=layout.dtype, gathered=parts)
        return exchange_weight(x, how, layout.spec, self._inner.rules)

    def _summing(self, x: Any, copy: jax.Array, layout: ParameterLayout) -> jax.Array | WorkingCopy | PackedWeight:
        """Return parameter `x` wrapped so that the backward pass sums its gradient over devices, sharded like x.

        A packed weight has no gradient.
        """
        if is_packed(x):
            return x
        parts = _data_shards(layout)
        weight = WorkingCopy(x, copy) if parts else x
        if layout.summed_by_module:
            return weight
        lacking = self._rules.lacking(layout.spec, self._split)
        how = self._exchange._replace(dtype=str(copy.dtype), scattered=parts, summed=lacking)
        return exchange_weight(weight, how, layout.spec, self._inner.rules)

    def _sum(self, gradient: jax.Array, layout: ParameterLayout) -> jax.Array:
        """Sum a gradient over the mesh axes that replicate its parameter, and shard it as the parameter is stored."""
        parts = _data_shards(layout)
        lacking = self._rules.lacking(layout.stored, self._split)
        if not parts and not lacking:
            return gradient
        how = self._exchange._replace(scattered=parts, summed=lacking)
        add = on_tensor_shards(functools.partial(sum_gradient, how=how), layout.spec, self._inner.rules)
        return add(gradient).astype(jnp.float32)

    def _noise_group(self, layout: ParameterLayout) -> Group:
        """Return the mesh axes that split and sum a microbatch's gradient, for the gradient noise scale."""

        def splitting(spec: PartitionSpec) -> tuple[str, ...]:
            lacking = self._rules.lacking(spec, self._split)
            return tuple(axis for axis in self._split if axis not in lacking)

        stored = splitting(layout.stored)
        if self._sums_at_use:
            return Group(stored, tuple(self._split), stored)
        return Group(splitting(layout.spec), splitting(layout.spec), stored)

    def _mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self._split) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _data_shards(layout: ParameterLayout) -> Dims:
    """Return the dim of the stored parameter that is split over `data`, if there is one."""
    return dims_of(layout.stored, ("data",))
