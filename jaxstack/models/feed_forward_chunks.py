"""Feed-forward sublayers applied to one chunk of the sequence after another, to save activation memory.

The MLP of a long sequence needs arrays of tokens x feed-forward size (in Llama 3 three and a half times the residual
stream), five of them in the backward pass. With chunks they exist for one chunk only, and are recomputed for the
gradient (Liu & Abbeel 2023, arXiv:2305.19370). A rematerialised layer recomputes them anyway, so this costs nothing.

Dims: B batch, T sequence, D model, P parts into which XLA partitions the sequence, S tokens per part.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxstack.parallel.rules import axes_of
from jaxstack.parallel.sharding_context import current_context, current_rules
from jaxstack.precision import ScalingState

CHUNK_BYTES = 2**30
"""Bytes per device that a chunk's widest activation array may have; longer inputs are cut."""

Modules = TypeVar("Modules")
"""A tree of Flax modules."""

Arrays: TypeAlias = Any
"""A tree of arrays: an NNX state."""

Function = Callable[[Arrays, Arrays, jax.Array], jax.Array]
"""(parameters, other states, x) -> result."""


def count_chunks(modules: PyTree, x: Float[Array, "B T D"], width: int, max_bytes: int | None = None) -> int:
    """Choose the number of chunks to cut the sequence x into, so that each one's activations fit in `max_bytes`.

    It is one for modules with states other than parameters and FP8 scaling, such as random states, which chunks would
    share.

    Args:
      width: last dim of the modules' widest activations, [B, T, width].
      max_bytes: bytes of these per device; None: `CHUNK_BYTES`.
    """
    rows, parts, mlp = _degrees(x.shape)
    size = x.shape[0] * x.shape[1] * width * x.dtype.itemsize // (rows * parts * mlp)
    length = x.shape[1] // parts
    count = -(-size // (max_bytes or CHUNK_BYTES))
    if count <= 1 or jax.tree.leaves(nnx.split(modules, nnx.Param, ScalingState, ...)[3]):
        return 1
    # Prefer chunks of equal length, if they have at least half the wanted size.
    return next((n for n in range(count, 2 * count + 1) if length % n == 0), min(count, length))


def apply_in_chunks(
    apply: Callable[[Modules, jax.Array], jax.Array], modules: Modules, x: Float[Array, "B T D"], count: int
) -> Float[Array, "B T D"]:
    """Apply a function to `count` chunks of the sequence in turn, recomputing activations in the backward pass.

    The chunks' gradients of a parameter are summed in float32; the amax values of FP8 are combined by maximum.

    Args:
      apply: acts on each token independently, and returns [B, T, D].
      modules: see `count_chunks`.
    """
    graphdef, params, states = nnx.split(modules, nnx.Param, ...)
    context = current_context()
    parts = _degrees(x.shape)[1]
    length = x.shape[1] // parts
    size = -(-length // count)

    def function(params: Arrays, states: Arrays, x: jax.Array) -> jax.Array:
        # The backward pass may be traced outside of the sharding context.
        with context.entered() if context is not None else contextlib.nullcontext():
            whole = x.reshape(x.shape[0], -1, x.shape[3])
            return apply(nnx.merge(graphdef, params, states), whole).reshape(x.shape)

    cut = x.reshape(x.shape[0], parts, length, x.shape[2])
    cut = jnp.pad(cut, ((0, 0), (0, 0), (0, -length % size), (0, 0))) if length % size else cut
    out = cast(jax.Array, _chunked(function, size, params, states, cut))
    return out[:, :, :length].reshape(x.shape)


def _degrees(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return into how many shards XLA partitions batch rows, sequence, and MLP activations."""
    rules = current_rules()
    if rules is None:
        return 1, 1, 1
    rows, parts, _ = (axes_of(part) for part in rules.spec(("batch", "residual_length", None), shape))
    mlp = axes_of(rules.spec(("act_mlp",))[0])
    # With Megatron's sequence parallelism the axis of the MLP splits the sequence outside of it.
    return tuple(rules.degree(axes) for axes in (rows, parts, [axis for axis in mlp if axis not in parts]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(function: Function, size: int, params: Arrays, states: Arrays, x: jax.Array) -> jax.Array:
    def step(out: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return _put(out, function(params, states, _cut(x, start, size)), start), None

    return jax.lax.scan(step, jnp.zeros_like(x), _starts(x, size))[0]


def _forward(function: Function, size: int, params: Arrays, states: Arrays, x: jax.Array) -> tuple[jax.Array, tuple]:
    return _chunked(function, size, params, states, x), (params, states, x)


def _backward(function: Function, size: int, saved: tuple, d_out: jax.Array) -> tuple:
    params, states, x = saved

    def step(carry: tuple, start: jax.Array) -> tuple[tuple, None]:
        d_params, d_states, d_x = carry
        _, pull = jax.vjp(function, params, states, _cut(x, start, size))
        new_params, new_states, new_x = pull(_cut(d_out, start, size))
        d_params = jax.tree.map(lambda total, part: total + part.astype(total.dtype), d_params, new_params)
        return (d_params, jax.tree.map(jnp.maximum, d_states, new_states), _put(d_x, new_x, start)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, max(p.dtype, jnp.float32, key=_width)), params)
    carry = zeros, jax.tree.map(jnp.zeros_like, states), jnp.zeros_like(x)
    (d_params, d_states, d_x), _ = jax.lax.scan(step, carry, _starts(x, size))
    return jax.tree.map(lambda d, p: d.astype(p.dtype), d_params, params), d_states, d_x


_chunked.defvjp(_forward, _backward)


def _width(dtype: jax.typing.DTypeLike) -> int:
    return jnp.dtype(dtype).itemsize


def _starts(x: jax.Array, size: int) -> jax.Array:
    return jnp.arange(0, x.shape[2], size)


def _cut(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=2)
