"""All-gathers a weight inside a `shard_map` for its use, and reduce-scatters its gradient to the stored shards.

Weights are sent in the compute dtype, gradients in a separate dtype: a sum over many devices in bfloat16 would
round at every addition.

Both transfers are collectives or peer-to-peer copies. NCCL's collectives are kernels. A matmul kernel starts one
program on every multiprocessor of a GPU; the programs for which a concurrent collective leaves no room run after all
others, so that the overlap saves almost no time. GPUs of one process can read each other's memory by their copy
engines, which occupy no multiprocessor. With `peer_copies` an all-gather is therefore one permute from each other
device (`PEER_COPIES` of `jaxstack.distributed.xla_options` compiles it to a copy) and a pass that puts the shards in
order; a reduce-scatter is a pass that cuts the gradient into shards, the permutes, and a sum.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

MOST_COPIED = 8
"""Maximum number of devices. Each sends to every other one, so that the number of copies grows quadratically."""


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
    parts = [x, *(_peer(x, axes, shift) for shift in range(1, devices))]
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

    parts = [part(0), *(_peer(part(shift), axes, shift) for shift in range(1, devices))]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)


def _peer(x: jax.Array, axes: tuple[str, ...], shift: int) -> jax.Array:
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
    """True sends by peer-to-peer copies in place of collectives, see `transfers`."""


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
    return _gather(weight, how)


def _use_forward(weight: jax.Array, stored: str, how: Exchange) -> tuple[jax.Array, None]:
    return _gather(weight, how), None


def _use_backward(stored: str, how: Exchange, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (sum_gradient(gradient, how).astype(stored),)


_use.defvjp(_use_forward, _use_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _use_copy(shard: jax.Array, copy: jax.Array, how: Exchange) -> jax.Array:
    return _gather(copy, how)


def _use_copy_forward(shard: jax.Array, copy: jax.Array, how: Exchange) -> tuple[jax.Array, None]:
    return _gather(copy, how), None


def _use_copy_backward(how: Exchange, _: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = list(gradient.shape)
    for axes, dim in how.gathered:
        shape[dim] //= jax.lax.axis_size(axes)
    return sum_gradient(gradient, how).astype(jnp.float32), jnp.zeros(shape, how.dtype)


_use_copy.defvjp(_use_copy_forward, _use_copy_backward)


def _gather(weight: jax.Array, how: Exchange) -> jax.Array:
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
