"""All-gathers a weight inside a `shard_map` for its use, and reduce-scatters its gradient to the stored shards.

Weights are sent in the compute dtype, gradients in a separate dtype: a sum over many devices in bfloat16 would
round at every addition.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.parallel.collectives import gather, scatter

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
