"""Sums of loss, weight and gradients over a global batch: over its microbatches, and over the devices.

Gradients are those of the sum over the real items of the whole global batch; the step divides once. There are two ways
to the same numbers. A module that gathers its own weights (`gathers_weights`, as our Transformer does) is run by each
device on its own part of the batch, in one `shard_map` over all axes but `tensor`; what its gradients lack is summed
once a step, after all microbatches. Any other module is one program over the global batch that XLA partitions.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack.functional import FunctionalModule
from jaxstack.loss import LossSum, as_loss_sum
from jaxstack.parallel.exchange import Dims, Exchange, Held, sum_gradient
from jaxstack.parallel.rules import AxisRules, Names, is_cast, logical_axis_rules, restrict
from jaxstack.parallel.weights import beside_tensor, dims_of, exchange_weight

Batch = Mapping[str, jax.Array]
LossFunction = Callable[..., Any]


class Sums(NamedTuple):
    """What a batch adds: gradient of the loss sum, loss sum, weight."""

    gradients: Any
    """Of the parameters that are trained; float32, laid out as these are stored."""
    loss: jax.Array
    weight: jax.Array
    maxima: Any = None
    """What comes as the gradient of FP8 scaling states, while microbatches and devices are combined."""

    def plus(self, other: "Sums") -> "Sums":
        """Both microbatches' together."""
        gradients, loss, weight = jax.tree.map(jnp.add, self[:3], other[:3])
        return Sums(gradients, loss, weight, jax.tree.map(jnp.maximum, self.maxima, other.maxima))


class Gradients(Protocol):
    """A way to compute the sums of a global batch; it may be called under `jax.jit` only."""

    def __call__(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        """The sums of the global batch, and the module's other variables after it."""
        ...

    def loss(self, params: Any, rest: Any, batch: Batch) -> LossSum:
        """The loss sum and weight of a batch, without gradients, accumulation and random key."""
        ...


def make_gradients(
    module: FunctionalModule, loss: LossFunction, rules: AxisRules, accumulation: int = 1
) -> "Gradients":
    """The way that suits the module and the layout.

    Args:
      loss: `loss(module, batch)` or `loss(module, batch, key)`; returns a scalar mean or a `LossSum`.
      accumulation: number of microbatches that a batch is cut into.
    """
    keyed = loss if takes_key(loss) else lambda model, batch, key: loss(model, batch)
    whole = GlobalGradients(Microbatches(module, keyed, accumulation), rules)
    if not module.gathers_weights or not rules.batch_axes:
        return whole
    return LocalGradients(Microbatches(module, keyed, accumulation, as_sum=_as_given), rules, whole)


class Microbatches:
    """A module and its loss over a batch in pieces, one after the other, their gradients added up in float32."""

    def __init__(
        self,
        module: FunctionalModule,
        loss: LossFunction,
        count: int,
        as_sum: Callable[[Any], LossSum] = as_loss_sum,
    ):
        self.module, self.count, self._loss, self._as_sum = module, count, loss, as_sum

    def loss(self, params: Any, rest: Any, batch: Batch, key: jax.Array | None) -> tuple[LossSum, Any]:
        """The loss of the batch as one piece, and the module's other variables after it."""
        model = self.module.merge(params, rest)
        return self._as_sum(self._loss(model, batch, key)), self.module.split(model)[1]

    def __call__(
        self,
        params: Any,
        rest: Any,
        batch: Batch,
        key: jax.Array,
        *,
        shards: int = 1,
        use: Callable[[Any], Any] = lambda params: params,
    ) -> tuple[Sums, Any]:
        """The sums of this batch, and the module's other variables after it.

        Args:
          shards: into how many parts XLA splits the batch's rows.
          use: makes of the parameters, to which the gradients belong, what the module gets.
        """
        if self.count == 1:
            return self._one(params, rest, batch, key, use)

        def add(carry: tuple[Sums, Any], item: tuple[Batch, jax.Array]) -> tuple[tuple[Sums, Any], None]:
            sums, rest = carry
            microbatch, index = item
            new, rest = self._one(params, rest, microbatch, jax.random.fold_in(key, index), use)
            return (sums.plus(new), rest), None

        zero = jnp.zeros((), jnp.float32)
        zeros = lambda tree: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), tree)  # noqa: E731
        start = Sums(zeros(self.module.split_frozen(params)[0]), zero, zero, zeros(self.module.split_scaling(rest)[0]))
        pieces = {name: self._split(x, shards) for name, x in batch.items()}
        carry, _ = jax.lax.scan(add, (start, rest), (pieces, jnp.arange(self.count)))
        return carry

    def _one(self, params: Any, rest: Any, batch: Batch, key: jax.Array, use: Callable[[Any], Any]) -> tuple[Sums, Any]:
        scaling, others = self.module.split_scaling(rest)
        trained, frozen = self.module.split_frozen(params)

        def objective(trained: Any, scaling: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            params = self.module.join(trained, frozen)
            loss, new = self.loss(use(params), self.module.join(scaling, others), batch, key)
            return loss.total, (loss.weight, new)

        compute = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (total, (weight, rest)), (gradients, maxima) = compute(trained, scaling)
        return Sums(gradients, total, weight, maxima), rest

    def finish(self, sums: Sums, rest: Any, axes: tuple[str, ...] = ()) -> tuple[Sums, Any]:
        """The sums without the maxima, which make the next scaling states, of all devices along `axes`."""
        maxima = jax.lax.pmax(sums.maxima, axes) if axes else sums.maxima
        return sums._replace(maxima=None), self.module.renew_scaling(rest, maxima)

    def _split(self, x: jax.Array, shards: int) -> jax.Array:
        """[B, ...] -> [count, B / count, ...], each device keeping its own rows."""
        rows = x.shape[0] // shards // self.count
        x = jnp.swapaxes(x.reshape(shards, self.count, rows, *x.shape[1:]), 0, 1)
        return x.reshape(self.count, shards * rows, *x.shape[3:])


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

    def __init__(self, microbatches: Microbatches, rules: AxisRules, otherwise: Gradients):
        self._microbatches, self._otherwise, self._rules = microbatches, otherwise, rules
        # Where XLA has nothing to partition, no axis is left to it: a kernel then needs no shard_map of its own.
        self._taken = [a for a in rules.mesh.axis_names if a != "tensor" or rules.mesh.shape[a] == 1]
        self._split = rules.batch_axes
        self._exchange = Exchange("", rules.reduce, copies=rules.copies)
        self._at_use = rules.zero == 2 or (rules.zero == 0 and microbatches.count == 1)
        summed = self._split if self._at_use else ()
        self._inner = dataclasses.replace(rules.within(self._taken), summed=summed)
        self._layouts = microbatches.module.map_parameters(self._layout, rules)
        self._specs = jax.tree.map(lambda x: restrict(x.stored, self._split), self._layouts)
        self._trained_layouts = microbatches.module.split_frozen(self._layouts)[0]
        self._trained_specs = microbatches.module.split_frozen(self._specs)[0]

    def __call__(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        def local(params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index(self._split))
            copies = jax.tree.map(self._copy, params, self._layouts)
            if self._at_use:
                use = lambda params: jax.tree.map(self._summing, params, copies, self._layouts)  # noqa: E731
                sums, rest = self._microbatches(params, rest, batch, key, use=use)
                gradients = sums.gradients
            else:
                sums, rest = self._microbatches(copies, rest, batch, key)
                gradients = jax.tree.map(self._sum, sums.gradients, self._trained_layouts)
            loss, weight = jax.lax.psum((sums.loss, sums.weight), self._split)
            sums = sums._replace(gradients=gradients, loss=loss, weight=weight)
            return self._microbatches.finish(sums, jax.tree.map(self._mean, rest), self._split)

        whole: Any = PartitionSpec()
        out_specs = (Sums(self._trained_specs, whole, whole), whole)
        try:
            return self._on_own_parts(local, out_specs, params, rest, batch, key)
        except _NotASumError:
            return self._otherwise(params, rest, batch, key)

    def loss(self, params: Any, rest: Any, batch: Batch) -> LossSum:
        def local(params: Any, rest: Any, batch: Batch) -> LossSum:
            copies = jax.tree.map(self._copy, params, self._layouts)
            return jax.lax.psum(self._microbatches.loss(copies, rest, batch, None)[0], self._split)

        try:
            return self._on_own_parts(local, PartitionSpec(), params, rest, batch)
        except _NotASumError:
            return self._otherwise.loss(params, rest, batch)

    def _on_own_parts(
        self, function: Callable[..., Any], out_specs: Any, params: Any, rest: Any, batch: Batch, *key: jax.Array
    ) -> Any:
        rules = self._rules

        def local(*arguments: Any) -> Any:
            with logical_axis_rules(self._inner):
                return function(*arguments)

        parts = {name: restrict(rules.batch_spec(x.shape, name), self._split) for name, x in batch.items()}
        return jax.shard_map(
            local,
            mesh=rules.mesh,
            in_specs=(self._specs, PartitionSpec(), parts, *(PartitionSpec() for _ in key)),
            out_specs=out_specs,
            axis_names=set(self._taken),
            check_vma=False,
        )(params, rest, dict(batch), *key)

    def _layout(self, names: Names | None, shape: tuple[int, ...], metadata: dict[str, Any]) -> Layout:
        rules = self._rules
        spec, stored = rules.parameter_spec(names, shape), rules.stored_spec(names, shape)
        dtype = self._microbatches.module.dtype if is_cast(names, shape) else None
        return Layout(spec, stored, str(jnp.dtype(dtype or jnp.float32)), bool(metadata.get("sum_where_used")))

    def _copy(self, x: jax.Array, layout: Layout) -> jax.Array:
        """A parameter as the microbatches use it: whole over `data`, in the compute dtype if it has to be gathered."""
        parts = _parts_of(layout)
        if not parts:
            return x
        how = self._exchange._replace(dtype=layout.dtype, gathered=parts)
        return exchange_weight(x, how, layout.spec, self._inner)

    def _summing(self, x: jax.Array, copy: jax.Array, layout: Layout) -> jax.Array | Held:
        """What the module gets for the parameter `x`, so that its gradient arrives summed up and in the layout of x."""
        parts = _parts_of(layout)
        held = Held(x, copy) if parts else x
        if layout.summed_by_module:
            return held
        lacking = self._rules.lacking(layout.spec, self._split)
        how = self._exchange._replace(dtype=str(copy.dtype), scattered=parts, summed=lacking)
        return exchange_weight(held, how, layout.spec, self._inner)

    def _sum(self, gradient: jax.Array, layout: Layout) -> jax.Array:
        """The sum of a whole gradient over the axes along which the parameter is whole, as the parameter is stored."""
        parts = _parts_of(layout)
        lacking = self._rules.lacking(layout.stored, self._split)
        if not parts and not lacking:
            return gradient
        how = self._exchange._replace(scattered=parts, summed=lacking)
        add = beside_tensor(lambda g: sum_gradient(g, how), layout.spec, self._inner)
        return add(gradient).astype(jnp.float32)

    def _mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self._split) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _parts_of(layout: Layout) -> Dims:
    """The dim that is split over `data` while the parameter is stored."""
    return dims_of(layout.stored, ("data",))


class GlobalGradients:
    """One program over the global batch, partitioned by XLA: statistics and means are those of all its rows.

    With ZeRO 1 and 2 the parameters are made whole over `data`, in float32, once a step, and the gradients split after
    the last microbatch: in which dtype such a module uses its parameters, and where, is not known here.
    """

    def __init__(self, microbatches: Microbatches, rules: AxisRules):
        self._microbatches, self._rules = microbatches, rules
        module = microbatches.module
        self._stored = module.split_frozen(module.parameter_specs(rules))[0]
        self._used = module.map_parameters(lambda names, shape, _: rules.parameter_spec(names, shape), rules)

    def __call__(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        sums, rest = self._sums(self._placed(params, self._used), rest, batch, key)
        return sums._replace(gradients=self._placed(sums.gradients, self._stored)), rest

    def _placed(self, tree: Any, specs: Any) -> Any:
        if not self._rules.zero:
            return tree
        place = lambda x, spec: jax.lax.with_sharding_constraint(x, self._rules.sharding(spec))  # noqa: E731
        return jax.tree.map(place, tree, specs)

    def _sums(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        rules = self._rules
        # `data` is either 1 or manual where rows are cut; the batch's other axes still split them.
        shards = rules.degree([axis for axis in rules.table["batch"] if axis != "data"])
        if self._microbatches.count == 1 or rules.mesh.shape["data"] == 1:
            with logical_axis_rules(rules):
                return self._microbatches.finish(*self._microbatches(params, rest, batch, key, shards=shards))

        # `data` is manual here: XLA, left to itself, would reduce gradients over it once a microbatch.
        def replica(params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
            with logical_axis_rules(rules.within(["data"])):
                sums, rest = self._microbatches(params, rest, batch, key, shards=shards)
            gradients, loss, weight = jax.lax.psum(sums[:3], "data")
            sums = sums._replace(gradients=gradients, loss=loss, weight=weight)
            return self._microbatches.finish(sums, jax.tree.map(_mean_over_data, rest), ("data",))

        whole, split = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(
            replica,
            mesh=rules.mesh,
            in_specs=(whole, whole, split, whole),
            out_specs=(whole, whole),
            axis_names={"data"},
            check_vma=False,
        )(params, rest, batch, key)

    def loss(self, params: Any, rest: Any, batch: Batch) -> LossSum:
        with logical_axis_rules(self._rules):
            return self._microbatches.loss(self._placed(params, self._used), rest, batch, None)[0]


class _NotASumError(Exception):
    """A loss that is the mean of a batch was asked for a part of it."""


def _as_given(loss: Any) -> LossSum:
    if not isinstance(loss, LossSum):
        raise _NotASumError
    return as_loss_sum(loss)


def _mean_over_data(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "data") if jnp.issubdtype(x.dtype, jnp.floating) else x


def takes_key(loss: LossFunction) -> bool:
    """Whether `loss` takes the random key: a third positional parameter, without a default or called `key`."""
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    third = positional[2] if len(positional) >= 3 else None
    return third is not None and (third.default is third.empty or third.name == "key")
