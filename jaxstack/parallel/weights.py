"""A stored parameter made ready for use: cast to the compute dtype, and whole over the `weight_axes`."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack.parallel.exchange import Dims, Exchange, WorkingCopy, exchange
from jaxstack.parallel.rules import AxisRules, Names, axes_of, current_rules, is_cast, placed, restrict


def gather_weight(x: jax.Array, names: Names | None, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """A whole stored parameter as the computation wants it: cast (not a vector), and whole over the `weight_axes`.

    Its gradient lies as it is stored. Does no more than cast outside of `logical_axis_rules`.
    """
    rules = current_rules()
    if dtype is not None and x.ndim > 1:
        x = x.astype(dtype)
    if rules is None or not any(map(rules.splits, rules.weight_axes)):
        return x
    stored = rules.parameter_spec(names, x.shape)
    whole = restrict(stored, set(rules.free) - set(rules.weight_axes))
    stored = restrict(stored, rules.free)
    # The cast value is pinned to the stored layout first. Without that pin XLA gathers float32 (twice the bytes), or
    # moves activations instead of weights when the use is inside a layer scan.
    return x if stored == whole else _gather(x, placed(rules, stored), placed(rules, whole))


def gather_parameter(parameter: nnx.Variable, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """The array of a Flax parameter as the computation wants it, see `gather_weight`.

    Inside the `shard_map` of a train step the parameter holds this device's shard, and its gradient is summed over
    the `weight_axes` where it is gathered; where its metadata say `sum_where_used`, over the rules' `summed` axes too.
    """
    rules, known = current_rules(), parameter.get_metadata()
    names = known.get("logical_axes")
    if rules is None or "fsdp" not in rules.manual:
        if names and ("expert" in names or "router" in names):
            return parameter[...]  # `with_local_tokens` casts and gathers them
        return gather_weight(parameter[...], names, dtype)
    value = parameter.get_raw_value()
    stored = value.shard if isinstance(value, WorkingCopy) else value
    shape = known.get("whole_shape") or stored.shape
    spec = rules.parameter_spec(names, shape)
    how = Exchange(
        dtype=str(jax.numpy.dtype(dtype if is_cast(names, shape) and dtype is not None else stored.dtype)),
        reduce=rules.reduce,
        gathered=dims_of(spec, rules.weight_axes),
        scattered=dims_of(rules.stored_spec(names, shape), ("data",)) if isinstance(value, WorkingCopy) else (),
        summed=rules.lacking(spec, rules.summed) if known.get("sum_where_used") else (),
        copies=rules.copies,
    )
    return exchange_weight(value, how, spec, rules)


def gathers_shards() -> bool:
    """Whether `gather_parameter` gathers shards inside a `shard_map`, so that `save_all_but_gathered` applies."""
    rules = current_rules()
    return rules is not None and "fsdp" in rules.manual and bool(rules.weight_axes)


_OF_ELEMENTS = """
    abs add add_any and broadcast_in_dim concatenate convert_element_type copy cos div dynamic_slice eq erf erfc exp
    exp2 expand_dims expm1 ge gt integer_pow iota le log log1p logistic lt max min mul ne neg not or pad pow
    random_bits random_fold_in random_split random_unwrap random_wrap reshape rev rsqrt select_n shift_left
    shift_right_logical sign sin slice split sqrt square squeeze sub tanh threefry2x32 transpose xor
"""
_COMPUTED_AGAIN = frozenset(("all_gather", "ppermute", "axis_index", *_OF_ELEMENTS.split()))
"""The gather of weights, by collectives or copies, and operations of elements: to repeat them costs little beside
keeping their results."""


def gathers_ahead() -> bool:
    """Whether a scan of layers is to gather the shards of the next layer while one runs."""
    rules = current_rules()
    return rules is not None and rules.prefetch and gathers_shards()


def save_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: the backward pass gathers weights again, and multiplies nothing again.

    Otherwise a forward pass without rematerialisation would leave the whole weights of all layers behind. What a matmul
    or a kernel gives is kept, and sums, and what passes `save_for_backward`. Operations of elements are done again, as part of what
    uses them: kept, each would be an array of its own, mostly in float32.
    """
    return primitive.name not in _COMPUTED_AGAIN


def save_for_backward(x: jax.Array) -> jax.Array:
    """Mark x, the result of elementwise operations, as one that `save_all_but_gathered` saves all the same."""
    return checkpoint_name(x, "kept")


def exchange_weight(value: jax.Array | WorkingCopy, how: Exchange, spec: PartitionSpec, rules: AxisRules) -> jax.Array:
    """`exchange` of a weight of this layout, see `beside_tensor`."""
    if not isinstance(value, WorkingCopy) and not how.gathered and not how.summed:
        return value.astype(how.dtype)
    scattered = {axis for axes, _ in how.scattered for axis in axes}
    summed = tuple(axis for axis in how.summed if axis not in scattered)
    return beside_tensor(lambda x: exchange(x, how._replace(summed=summed)), spec, rules)(value)


def beside_tensor(function: Callable[[Any], jax.Array], spec: PartitionSpec, rules: AxisRules) -> Callable[..., Any]:
    """`function` of a weight of this layout, applied to each device's part along a `tensor` axis left to XLA.

    Collectives along other axes would otherwise be of the weight made whole over the tensor axis.
    """
    parts = restrict(spec, ("tensor",))
    if not rules.splits("tensor") or not dims_of(parts, ("tensor",)):
        return function
    return jax.shard_map(function, in_specs=parts, out_specs=parts, axis_names={"tensor"}, check_vma=False)


def dims_of(spec: PartitionSpec, axes: Collection[str]) -> Dims:
    """(those of the mesh axes that split it, dim) for each dim that any of them split."""
    parts = (tuple(a for a in axes_of(part) if a in axes) for part in spec)
    return tuple((own, dim) for dim, own in enumerate(parts) if own)


Placement = NamedSharding | PartitionSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, stored: Placement, whole: Placement) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, stored), whole)


def _gather_forward(x: jax.Array, stored: Placement, whole: Placement) -> tuple[jax.Array, None]:
    return _gather(x, stored, whole), None


def _gather_backward(stored: Placement, whole: Placement, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The transposed constraint would ask for the whole gradient first: an all-reduce where a reduce-scatter does.
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gather.defvjp(_gather_forward, _gather_backward)
