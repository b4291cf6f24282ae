"""How a weight travels inside a `shard_map`: gathered where it is used, its gradient summed back to where it is stored.

Weights move in the compute dtype, gradients in a dtype of their own: a sum over many devices in bfloat16 would round
at every addition.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.parallel.transfers import gather, scatter

Dims = tuple[tuple[tuple[str, ...], int], ...]
"""Mesh axes, major to minor, and the dim of the array that they split."""


class Exchange(NamedTuple):
    """A way between the stored and the used form of a weight."""

    dtype: str
    """That the weight is used and moved in."""
    reduce: str
    """Dtype in which gradients are summed."""
    gathered: Dims = ()
    """Splits that are undone for use; the gradient is scattered again."""
    scattered: Dims = ()
    """Splits of the gradient that the weight does not have: it comes as a `WorkingCopy`."""
    summed: tuple[str, ...] = ()
    """Further axes that the gradient is summed over, where the weight is the same everywhere."""
    copies: bool = False
    """Whether it travels by copies instead of collectives, see `transfers`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WorkingCopy:
    """A weight of which this device stores a shard, and has a whole working copy for the length of a step.

    The gradient goes to the shard (ZeRO-2: no device ever has all of it).
    """

    shard: jax.Array
    copy: jax.Array


def exchange(weight: jax.Array | WorkingCopy, how: Exchange) -> jax.Array:
    """The weight as it is used; its gradient arrives as it is stored."""
    if isinstance(weight, WorkingCopy):
        return _use_held(weight.shard, weight.copy, how)
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
def _use_held(shard: jax.Array, copy: jax.Array, how: Exchange) -> jax.Array:
    return _gather(copy, how)


def _use_held_forward(shard: jax.Array, copy: jax.Array, how: Exchange) -> tuple[jax.Array, None]:
    return _gather(copy, how), None


def _use_held_backward(how: Exchange, _: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = list(gradient.shape)
    for axes, dim in how.gathered:
        shape[dim] //= jax.lax.axis_size(axes)
    return sum_gradient(gradient, how).astype(jnp.float32), jnp.zeros(shape, how.dtype)


_use_held.defvjp(_use_held_forward, _use_held_backward)


def _gather(weight: jax.Array, how: Exchange) -> jax.Array:
    weight = weight.astype(how.dtype)
    for axes, dim in how.gathered:
        weight = gather(weight, axes, dim, copies=how.copies)
    return weight


def sum_gradient(gradient: jax.Array, how: Exchange) -> jax.Array:
    """The gradient of a used weight, as the stored weight lies, in the dtype `how.reduce`."""
    for axes, dim in (*how.gathered, *how.scattered):
        gradient = scatter(gradient, axes, dim, how.reduce, copies=how.copies)
    gradient = gradient.astype(how.reduce)
    return jax.lax.psum(gradient, how.summed) if how.summed else gradient
