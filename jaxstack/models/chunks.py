"""A sublayer that treats every token alike, a chunk of the sequence at a time.

The MLP of a long sequence holds arrays of tokens x feed-forward size, in Llama 3 three and a half times the residual
stream, and five of them in the backward pass. In chunks they exist for some tokens only, and are computed again for
the gradient (Liu & Abbeel, arXiv:2305.19370). In a layer that is rematerialised they would be anyway: it costs nothing.

Dims: B batch, T sequence, D model, P parts of the sequence between which XLA partitions it, S tokens of a part.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.parallel.context import current_context, current_rules
from jaxstack.parallel.rules import axes_of
from jaxstack.precision.recipe import ScalingState

CHUNK_BYTES = 2**30
"""What a device holds of one array of a chunk's widest activations; longer inputs are cut."""

Function = Callable[[Any, Any, jax.Array], jax.Array]


def count_chunks(modules: Any, x: jax.Array, width: int, most: int | None = None) -> int:
    """In how many chunks the modules may take x [B, T, D]; 1: at once.

    So is what holds more than parameters and FP8 scaling states, as random states, which chunks would share.

    Args:
      width: of the modules' widest activations, [B, T, width].
      most: bytes of these that a device may hold; None: `CHUNK_BYTES`.
    """
    rows, parts, mlp = _degrees(x.shape)
    held = x.shape[0] * x.shape[1] * width * x.dtype.itemsize // (rows * parts * mlp)
    length, count = x.shape[1] // parts, -(-held // (most or CHUNK_BYTES))
    if count <= 1 or jax.tree.leaves(nnx.split(modules, nnx.Param, ScalingState, ...)[3]):
        return 1
    # Equal chunks, if there are any of at least half the size.
    return next((n for n in range(count, 2 * count + 1) if length % n == 0), min(count, length))


def apply_in_chunks(apply: Callable[[Any, jax.Array], jax.Array], modules: Any, x: jax.Array, count: int) -> jax.Array:
    """`apply(modules, x)` of x [B, T, D], in `count` chunks of T of which nothing is kept for the gradient.

    The chunks' gradients of a parameter are added up in float32, the largest magnitudes of FP8 by maximum.

    Args:
      apply: treats every token alike, and returns [B, T, D].
      modules: a tree of Flax modules, see `count_chunks`.
    """
    graphdef, params, states = nnx.split(modules, nnx.Param, ...)
    context, parts = current_context(), _degrees(x.shape)[1]
    length = x.shape[1] // parts
    size = -(-length // count)

    def function(params: Any, states: Any, x: jax.Array) -> jax.Array:
        # The backward pass may be traced outside of the rules.
        with context.entered() if context is not None else contextlib.nullcontext():
            whole = x.reshape(x.shape[0], -1, x.shape[3])
            return apply(nnx.merge(graphdef, params, states), whole).reshape(x.shape)

    cut = x.reshape(x.shape[0], parts, length, x.shape[2])
    cut = jnp.pad(cut, ((0, 0), (0, 0), (0, -length % size), (0, 0))) if length % size else cut
    out = cast(jax.Array, _chunked(function, size, params, states, cut))
    return out[:, :, :length].reshape(x.shape)


def _degrees(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Into how many parts XLA partitions rows, sequence and the activations of an MLP."""
    rules = current_rules()
    if rules is None:
        return 1, 1, 1
    rows, parts, _ = (axes_of(part) for part in rules.spec(("batch", "residual_length", None), shape))
    mlp = axes_of(rules.spec(("act_mlp",))[0])
    # With Megatron's sequence parallelism the axis of the MLP splits the sequence up to there.
    return tuple(rules.degree(axes) for axes in (rows, parts, [axis for axis in mlp if axis not in parts]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(function: Function, size: int, params: Any, states: Any, x: jax.Array) -> jax.Array:
    def step(out: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return _put(out, function(params, states, _cut(x, start, size)), start), None

    return jax.lax.scan(step, jnp.zeros_like(x), _starts(x, size))[0]


def _forward(function: Function, size: int, params: Any, states: Any, x: jax.Array) -> tuple[jax.Array, tuple]:
    return _chunked(function, size, params, states, x), (params, states, x)


def _backward(function: Function, size: int, saved: tuple, d_out: jax.Array) -> tuple:
    params, states, x = saved

    def step(carry: tuple, start: jax.Array) -> tuple[tuple, None]:
        d_params, d_states, d_x = carry
        _, pull = jax.vjp(function, params, states, _cut(x, start, size))
        of_params, of_states, of_x = pull(_cut(d_out, start, size))
        d_params = jax.tree.map(lambda total, part: total + part.astype(total.dtype), d_params, of_params)
        return (d_params, jax.tree.map(jnp.maximum, d_states, of_states), _put(d_x, of_x, start)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, max(p.dtype, jnp.float32, key=_width)), params)
    carry = zeros, jax.tree.map(jnp.zeros_like, states), jnp.zeros_like(x)
    (d_params, d_states, d_x), _ = jax.lax.scan(step, carry, _starts(x, size))
    return jax.tree.map(lambda d, p: d.astype(p.dtype), d_params, params), d_states, d_x


_chunked.defvjp(_forward, _backward)


def _width(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


def _starts(x: jax.Array, size: int) -> jax.Array:
    return jnp.arange(0, x.shape[2], size)


def _cut(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=2)
