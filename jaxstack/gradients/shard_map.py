"""Gradients computed by each device on its own part of the batch, in one `shard_map` over all axes but `tensor`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.gradients.microbatches import Batch, Gradients, Microbatches, Sums
from jaxstack.loss import LossSum, as_loss_sum
from jaxstack.parallel.context import ShardingContext, TracedParameters
from jaxstack.parallel.exchange import Dims, Exchange, WorkingCopy, sum_gradient
from jaxstack.parallel.rules import Names, is_cast, restrict
from jaxstack.parallel.weights import dims_of, exchange_weight, on_tensor_shards


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter lies on the mesh."""

    spec: PartitionSpec
    """As it is used in a step."""
    stored: PartitionSpec
    """As it is stored between steps: with ZeRO 1 and 2 in parts over `data` too."""
    dtype: str
    """Of the copy of a parameter stored in parts."""
    summed_by_module: bool
    """Whether the module itself sums the gradient where asked to, see `gather_parameter`."""


class LocalGradients:
    """Each device runs the module on its own part of the batch, with its own shards of the parameters.

    Over the `weight_axes` a gradient is summed where its weight was gathered. Over the other axes it is summed where
    the weight is used if there is one microbatch, so that the rest of the backward pass can run meanwhile, else once
    after all of them. With ZeRO 1 and 2 a copy in the compute dtype is gathered once a step, and gradients go back in
    parts: with 1 after all microbatches, with 2 wherever the weight is used, so that whole gradients never exist.

    A loss that is no `LossSum` may not add up over parts of a batch: it gets the whole one, from `otherwise`.
    """

    def __init__(self, microbatches: Microbatches, context: ShardingContext, otherwise: Gradients):
        rules, layout = context.rules, context.layout
        self._microbatches, self._otherwise, self._rules, self._zero = microbatches, otherwise, rules, layout.zero
        # Where XLA has nothing to partition, no axis is left to it: a kernel then needs no shard_map of its own.
        self._taken = [a for a in rules.mesh.axis_names if a != "tensor" or rules.mesh.shape[a] == 1]
        self._split = rules.batch_axes
        self._exchange = Exchange("", layout.reduce_dtype, peer_copies=layout.peer_copies)
        self._at_use = layout.zero == 2 or (layout.zero == 0 and microbatches.count == 1)
        summed = self._split if self._at_use else ()
        self._inner = dataclasses.replace(context.within(self._taken), parameters=TracedParameters(summed=summed))
        self._layouts = microbatches.module.map_parameters(self._layout, rules)
        self._specs = jax.tree.map(lambda x: restrict(x.stored, self._split), self._layouts)
        self._trained_layouts = microbatches.module.split_frozen(self._layouts)[0]
        self._trained_specs = microbatches.module.split_frozen(self._specs)[0]

    def __call__(self, params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        def local(params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index(self._split))
            copies = jax.tree.map(self._copy, params, self._layouts)
            if self._at_use:
                use = lambda params: jax.tree.map(self._summing, params, copies, self._layouts)  # noqa: E731
                sums, non_params = self._microbatches(params, non_params, batch, key, use=use)
                gradients = sums.gradients
            else:
                sums, non_params = self._microbatches(copies, non_params, batch, key)
                gradients = jax.tree.map(self._sum, sums.gradients, self._trained_layouts)
            loss, weight = jax.lax.psum((sums.loss, sums.weight), self._split)
            sums = sums._replace(gradients=gradients, loss=loss, weight=weight)
            return self._microbatches.finish(sums, jax.tree.map(self._mean, non_params), self._split)

        whole: Any = PartitionSpec()
        out_specs = (Sums(self._trained_specs, whole, whole), whole)
        try:
            return self._on_own_parts(local, out_specs, params, non_params, batch, key)
        except NotASumError:
            return self._otherwise(params, non_params, batch, key)

    def loss(self, params: Any, non_params: Any, batch: Batch) -> LossSum:
        def local(params: Any, non_params: Any, batch: Batch) -> LossSum:
            copies = jax.tree.map(self._copy, params, self._layouts)
            return jax.lax.psum(self._microbatches.loss(copies, non_params, batch, None)[0], self._split)

        try:
            return self._on_own_parts(local, PartitionSpec(), params, non_params, batch)
        except NotASumError:
            return self._otherwise.loss(params, non_params, batch)

    def _on_own_parts(
        self, function: Callable[..., Any], out_specs: Any, params: Any, non_params: Any, batch: Batch, *key: jax.Array
    ) -> Any:
        rules = self._rules

        def local(*arguments: Any) -> Any:
            with self._inner.entered():
                return function(*arguments)

        parts = {name: restrict(rules.batch_spec(x.shape, name), self._split) for name, x in batch.items()}
        return jax.shard_map(
            local,
            mesh=rules.mesh,
            in_specs=(self._specs, PartitionSpec(), parts, *(PartitionSpec() for _ in key)),
            out_specs=out_specs,
            axis_names=set(self._taken),
            check_vma=False,
        )(params, non_params, dict(batch), *key)

    def _layout(self, names: Names | None, shape: tuple[int, ...], metadata: dict[str, Any]) -> Layout:
        rules = self._rules
        spec, stored = rules.parameter_spec(names, shape), rules.stored_spec(names, shape, self._zero)
        dtype = self._microbatches.module.dtype if is_cast(names, shape) else None
        return Layout(spec, stored, str(jnp.dtype(dtype or jnp.float32)), bool(metadata.get("sum_where_used")))

    def _copy(self, x: jax.Array, layout: Layout) -> jax.Array:
        """A parameter as the microbatches use it: whole over `data`, in the compute dtype if it has to be gathered."""
        parts = _parts_of(layout)
        if not parts:
            return x
        how = self._exchange._replace(dtype=layout.dtype, gathered=parts)
        return exchange_weight(x, how, layout.spec, self._inner.rules)

    def _summing(self, x: jax.Array, copy: jax.Array, layout: Layout) -> jax.Array | WorkingCopy:
        """What the module gets for the parameter `x`, so that its gradient arrives summed up and in the layout of x."""
        parts = _parts_of(layout)
        held = WorkingCopy(x, copy) if parts else x
        if layout.summed_by_module:
            return held
        lacking = self._rules.lacking(layout.spec, self._split)
        how = self._exchange._replace(dtype=str(copy.dtype), scattered=parts, summed=lacking)
        return exchange_weight(held, how, layout.spec, self._inner.rules)

    def _sum(self, gradient: jax.Array, layout: Layout) -> jax.Array:
        """The sum of a whole gradient over the axes along which the parameter is whole, as the parameter is stored."""
        parts = _parts_of(layout)
        lacking = self._rules.lacking(layout.stored, self._split)
        if not parts and not lacking:
            return gradient
        how = self._exchange._replace(scattered=parts, summed=lacking)
        add = on_tensor_shards(lambda g: sum_gradient(g, how), layout.spec, self._inner.rules)
        return add(gradient).astype(jnp.float32)

    def _mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self._split) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _parts_of(layout: Layout) -> Dims:
    """The dim that is split over `data` while the parameter is stored."""
    return dims_of(layout.stored, ("data",))


class NotASumError(Exception):
    """A loss that is the mean of a batch was asked for a part of it."""


def as_given(loss: Any) -> LossSum:
    if not isinstance(loss, LossSum):
        raise NotASumError
    return as_loss_sum(loss)
