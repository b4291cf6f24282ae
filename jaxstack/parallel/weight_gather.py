"""Casts stored parameters to the compute dtype, and all-gathers their shards where a module uses them.

Inside a `shard_map` an `Exchange` says how: weights are sent in the compute dtype, gradients are reduce-scattered to
the stored shards in a separate dtype, as a sum over many devices in bfloat16 would round at every addition.

Both transfers are collectives or peer-to-peer copies. NCCL's collectives are kernels. A matmul kernel starts one
program on every multiprocessor of a GPU; the programs for which a concurrent collective leaves no room run after all
others, so that the overlap saves almost no time. GPUs of one host can reach each other's memory by their copy
engines, which occupy no multiprocessor. With `peer_copies` an all-gather is therefore one permute from each other
device (`PEER_COPIES` of `jaxstack.distributed.xla_options` compiles it to a copy) and a pass that puts the shards in
order; a reduce-scatter is a pass that cuts the gradient into shards, the permutes, and a sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxstack.parallel.rules import KEEP_FLOAT32, AxisRules, Names, axes_of, is_cast, restrict
from jaxstack.parallel.sharding_context import ShardingContext, current_context, placed
from pallas_kernels import PackedWeight

MOST_COPIED = 8
"""Maximum number of devices. Each sends to every other one, so that the number of copies grows quadratically."""


def share_host(
    devices: Iterable[jax.Device],  # pyright: ignore[reportInvalidTypeForm] (a variable in jax's stubs)
) -> bool:
    """Return True if all devices are of one host, of a single process or of several.

    JAX tells by the kernel's boot id which processes share one. A device that does not tell, such as a CPU, is taken to
    be on a host of its process alone.
    """
    return len({getattr(device, "slice_index", device.process_index) for device in devices}) == 1


def in_one_process(mesh: Mesh | AbstractMesh) -> bool:
    """Return True if the mesh has 2 to `MOST_COPIED` GPUs, all of one process, so that they can copy peer to peer."""
    if isinstance(mesh, AbstractMesh) or not 1 < mesh.size <= MOST_COPIED:
        return False
    devices = mesh.devices.flat
    return devices[0].platform in ("gpu", "cuda") and len({device.process_index for device in devices}) == 1


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, *, peer_copies: bool) -> jax.Array:
    """All-gather the shards of the `n` devices along `axes`, in order: [..., D, ...] -> [..., n D, ...].

    Args:
      x: this device's shard.
      axes: manual mesh axes, major to minor.
      dim: the dim that is concatenated.
      peer_copies: True sends by peer-to-peer copies in place of a collective.
    """
    if not peer_copies:
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    devices = jax.lax.axis_size(axes)
    own = jax.lax.axis_index(axes)
    size = x.shape[dim]
    parts = [x, *(_from_peer(x, axes, shift) for shift in range(1, devices))]
    # The shards are in order, starting with this device's own; a window into two rounds of them starts with shard 0.
    twice = jnp.concatenate([*parts, *parts[:-1]], dim)
    return jax.lax.dynamic_slice_in_dim(twice, (devices - own) % devices * size, devices * size, dim)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, dtype: str, *, peer_copies: bool) -> jax.Array:
    """Reduce-scatter over the `n` devices along `axes`: [..., n D, ...] -> [..., D, ...] in `dtype`.

    Peer-to-peer copies send the narrower of the dtypes of `x` and `dtype`, and sum in float32: a bfloat16 gradient is
    summed in float32 at the cost of sending bfloat16.

    Args:
      x: this device's summand.
      axes: manual mesh axes, major to minor.
      dim: the dim that is split.
      dtype: of the result, and of the sum of a collective.
      peer_copies: True sends by peer-to-peer copies in place of a collective.
    """
    if not peer_copies:
        return jax.lax.psum_scatter(x.astype(dtype), axes, scatter_dimension=dim, tiled=True)
    devices = jax.lax.axis_size(axes)
    own = jax.lax.axis_index(axes)
    size = x.shape[dim] // jax.lax.axis_size(axes)
    sent = x.astype(dtype) if jnp.dtype(dtype).itemsize < x.dtype.itemsize else x

    def part(shift):
        return jax.lax.dynamic_slice_in_dim(sent, (own - shift) % devices * size, size, dim)

    parts = [part(0), *(_from_peer(part(shift), axes, shift) for shift in range(1, devices))]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)


def _from_peer(x: jax.Array, axes: tuple[str, ...], shift: int) -> jax.Array:
    """Return the array x of the device `shift` positions further along the mesh axes, cyclically."""
    devices = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(source, (source - shift) % devices) for source in range(devices)])


Dims = tuple[tuple[tuple[str, ...], int], ...]
"""(mesh axes, major to minor; dim of the array that they split), for each such dim."""


class Exchange(NamedTuple):
    """Settings for all-gathering a weight before its use and reducing its gradient: dtypes, dims and mesh axes."""

    dtype: str
    """Dtype in which the weight is used and sent."""
    reduce_dtype: str
    """Dtype in which gradients are summed over devices."""
    gathered: Dims = ()
    """Shards of the weight that are all-gathered for its use; its gradient is reduce-scattered along them."""
    scattered: Dims = ()
    """Dims along which only the gradient is reduce-scattered; the weight is a `WorkingCopy`, whole along them."""
    summed: tuple[str, ...] = ()
    """Further mesh axes over which the gradient is all-reduced: the weight is replicated over them."""
    peer_copies: bool = False
    """True sends by peer-to-peer copies in place of collectives."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WorkingCopy:
    """A stored shard of a weight, with the copy of the whole weight that this device gathers for one step (ZeRO-2).

    The gradient belongs to the shard: it is reduce-scattered where the copy is used, so that no device ever holds all
    of it.
    """

    shard: jax.Array
    """The float32 shard that this device stores."""
    copy: jax.Array
    """The weight in the compute dtype, whole over `data`, and still a shard over the axes of `Exchange.gathered`."""


def exchange(weight: jax.Array | WorkingCopy, how: Exchange) -> jax.Array:
    """Return a stored weight all-gathered for use; its gradient is reduced to the stored layout and dtype."""
    if isinstance(weight, WorkingCopy):
        return _use_copy(weight.shard, weight.copy, how)
    return _use(weight, jnp.dtype(weight.dtype).name, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _use(weight: jax.Array, stored: str, how: Exchange) -> jax.Array:
    return _gather_shards(weight, how)


def _use_forward(weight: jax.Array, stored: str, how: Exchange) -> tuple[jax.Array, None]:
    return _gather_shards(weight, how), None


def _use_backward(stored: str, how: Exchange, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (sum_gradient(gradient, how).astype(stored),)


_use.defvjp(_use_forward, _use_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _use_copy(shard: jax.Array, copy: jax.Array, how: Exchange) -> jax.Array:
    return _gather_shards(copy, how)


def _use_copy_forward(shard: jax.Array, copy: jax.Array, how: Exchange) -> tuple[jax.Array, None]:
    return _gather_shards(copy, how), None


def _use_copy_backward(how: Exchange, _: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = list(gradient.shape)
    for axes, dim in how.gathered:
        shape[dim] //= jax.lax.axis_size(axes)
    return sum_gradient(gradient, how).astype(jnp.float32), jnp.zeros(shape, how.dtype)


_use_copy.defvjp(_use_copy_forward, _use_copy_backward)


def _gather_shards(weight: jax.Array, how: Exchange) -> jax.Array:
    weight = weight.astype(how.dtype)
    for axes, dim in how.gathered:
        weight = gather(weight, axes, dim, peer_copies=how.peer_copies)
    return weight


def sum_gradient(gradient: jax.Array, how: Exchange) -> jax.Array:
    """Sum the gradient of a gathered weight over devices in `how.reduce_dtype`, into the layout of the stored shard."""
    for axes, dim in (*how.gathered, *how.scattered):
        gradient = scatter(gradient, axes, dim, how.reduce_dtype, peer_copies=how.peer_copies)
    gradient = gradient.astype(how.reduce_dtype)
    return jax.lax.psum(gradient, how.summed) if how.summed else gradient


Value = TypeVar("Value", bound=jax.Array | WorkingCopy)


def gather_weight(x: jax.Array, names: Names | None, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """Cast a stored parameter to the compute dtype, and all-gather it over the axes that shard weights (fsdp, context).

    Its gradient has the layout in which it is stored. Outside of `logical_axis_rules` it is only cast.

    Args:
      x: the parameter as a global array, sharded as `AxisRules.parameter_spec` says.
      names: its logical axes, or None.
      dtype: the compute dtype, which vectors are not cast to; None: the stored dtype.
    """
    context = current_context()
    if dtype is not None and x.ndim > 1:
        x = x.astype(dtype)
    if context is None or not any(map(context.rules.xla_splits, context.rules.weight_axes)):
        return x
    rules = context.rules
    stored = context.parameter_spec(names, x.shape)
    whole = restrict(stored, set(rules.free) - set(rules.weight_axes))
    stored = restrict(stored, rules.free)
    # The cast value is constrained to the stored layout first. Without this XLA gathers float32 (twice the bytes), or
    # gathers activations in place of weights if the use is inside a scan of layers.
    return x if stored == whole else _gather(x, placed(rules, stored), placed(rules, whole))


def gather_parameter(parameter: nnx.Variable, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """Return a Flax parameter for use: in the compute dtype, all-gathered over the axes that shard weights.

    A `PackedWeight` is returned as it is: it is converted where it is multiplied, and XLA partitions the product.

    Inside the `shard_map` of a train step the parameter holds this device's shard, and its gradient is reduce-scattered
    over the `weight_axes`. If its metadata has `sum_where_used`, the gradient is also summed over the axes of
    `TracedParameters.summed`. If it has `KEEP_FLOAT32`, the parameter is not cast.
    """
    context = current_context()
    known = parameter.get_metadata()
    dtype = None if known.get(KEEP_FLOAT32) else dtype
    names = known.get("logical_axes")
    if isinstance(value := parameter.get_raw_value(), PackedWeight):
        return cast(jax.Array, value)
    if context is None or "fsdp" not in context.rules.manual:
        if names and ("expert" in names or "router" in names):
            return parameter[...]  # `with_local_tokens` casts and gathers them
        return gather_weight(parameter[...], names, dtype)
    rules = context.rules
    stored = value.shard if isinstance(value, WorkingCopy) else value
    shape = known.get("whole_shape") or stored.shape
    spec = context.parameter_spec(names, shape)
    how = Exchange(
        dtype=str(jax.numpy.dtype(dtype if is_cast(names, shape, known) and dtype is not None else stored.dtype)),
        reduce_dtype=context.layout.reduce_dtype,
        gathered=dims_of(spec, rules.weight_axes),
        scattered=dims_of(context.stored_spec(names, shape), ("data",)) if isinstance(value, WorkingCopy) else (),
        summed=rules.lacking(spec, context.parameters.summed) if known.get("sum_where_used") else (),
        peer_copies=context.layout.peer_copies,
    )
    return exchange_weight(value, how, spec, rules)


def gathers_shards() -> bool:
    """Return True if weights are all-gathered inside a `shard_map`: the backward pass must then gather them again."""
    return _gathers_shards(current_context())


def _gathers_shards(context: ShardingContext | None) -> bool:
    return context is not None and "fsdp" in context.rules.manual and bool(context.rules.weight_axes)


_ELEMENTWISE = """
    abs add add_any and broadcast_in_dim concatenate convert_element_type copy cos div dynamic_slice eq erf erfc exp
    exp2 expand_dims expm1 ge gt integer_pow iota le log log1p logistic lt max min mul ne neg not or pad pow
    random_bits random_fold_in random_split random_unwrap random_wrap reshape rev rsqrt select_n shift_left
    shift_right_logical sign sin slice split sqrt square squeeze sub tanh threefry2x32 transpose xor
"""
_RECOMPUTED = frozenset(("all_gather", "ppermute", "axis_index", *_ELEMENTWISE.split()))
"""Primitives that the backward pass repeats: the gather of weights, by collectives or peer-to-peer copies, and
elementwise operations. They take less time than writing and reading their results."""


def gathers_ahead() -> bool:
    """Return True if a scan of layers should all-gather the next layer's weights while a layer computes."""
    context = current_context()
    return context is not None and context.layout.prefetch and _gathers_shards(context)


def save_all_but_gathered(primitive: Primitive, *_: object, **__: object) -> bool:
    """Policy for `jax.checkpoint` that saves everything except gathered weights and elementwise results.

    Without it a forward pass without rematerialisation would save the gathered weights of all layers. Results of
    matmuls, kernels and reductions are saved, and arrays marked by `save_for_backward`. Elementwise operations are
    repeated, fused with what uses them; saved, each result would be its own array, mostly in float32.
    """
    return primitive.name not in _RECOMPUTED


def save_for_backward(x: jax.Array) -> jax.Array:
    """Mark an elementwise result to be saved for the backward pass, where it would otherwise be recomputed."""
    return checkpoint_name(x, "kept")


def exchange_weight(value: jax.Array | WorkingCopy, how: Exchange, spec: PartitionSpec, rules: AxisRules) -> jax.Array:
    """Return a weight all-gathered for use, separately for each shard along `tensor` if XLA partitions that axis.

    Args:
      value: this device's shard, or its `WorkingCopy`.
      how: the communication.
      spec: the layout of the weight, as `AxisRules.parameter_spec` returns.
      rules: the rules inside the surrounding `shard_map`.
    """
    if not isinstance(value, WorkingCopy) and not how.gathered and not how.summed:
        return value.astype(how.dtype)
    scattered = {axis for axes, _ in how.scattered for axis in axes}
    summed = tuple(axis for axis in how.summed if axis not in scattered)
    return on_tensor_shards(lambda x: exchange(x, how._replace(summed=summed)), spec, rules)(value)


def on_tensor_shards(
    function: Callable[[Value], jax.Array], spec: PartitionSpec, rules: AxisRules
) -> Callable[[Value], jax.Array]:
    """Return `function` mapped over a weight's shards along `tensor` if XLA partitions that axis, else unchanged.

    Without the map XLA would gather the weight over `tensor` before each collective along another axis.

    Args:
      function: takes and returns an array of the layout `spec`.
      spec: the layout of the weight.
      rules: the rules inside the surrounding `shard_map`.
    """
    parts = restrict(spec, ("tensor",))
    if not rules.xla_splits("tensor") or not dims_of(parts, ("tensor",)):
        return function
    return jax.shard_map(function, in_specs=parts, out_specs=parts, axis_names={"tensor"}, check_vma=False)


def dims_of(spec: PartitionSpec, axes: Collection[str]) -> Dims:
    """Return (mesh axes, dim) for each dim that `spec` splits along some of these mesh axes."""
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
