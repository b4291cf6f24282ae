"""A sublayer that treats every token alike, a chunk of the sequence at a time.

The MLP of a long sequence holds arrays of tokens x feed-forward size, in Llama 3 three and a half times the residual
stream, and five of them in the backward pass. In chunks they exist for some tokens only, and are computed again for
the gradient (Liu & Abbeel, arXiv:2305.19370). In a layer that is rematerialised they would be anyway: it costs nothing.

Dims: B batch, T sequence, D model, P parts of the sequence between which XLA partitions it, S tokens of a part.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.parallel.rules import axes_of, current_rules, logical_axis_rules
from jaxstack.precision.recipe import ScalingState

CHUNK_BYTES = 2**30
"""What a device holds of one array of a chunk's widest activations; longer inputs are cut."""

Function = Callable[[Any, Any, jax.Array], jax.Array]


def apply_in_chunks(
    apply: Callable[[Any, jax.Array], jax.Array], modules: Any, x: jax.Array, width: int, most: int | None = None
) -> jax.Array:
    """`apply(modules, x)` of x [B, T, D], in chunks of T of which nothing is kept for the gradient.

    An input that is one chunk, or modules that hold more than parameters and FP8 scaling states (which chunks would
    share), are computed at once. The chunks' gradients of a parameter are added up in float32, the largest magnitudes
    of FP8 by maximum.

    Args:
      apply: treats every token alike, and returns [B, T, D].
      modules: a tree of Flax modules.
      width: of the widest activations, [B, T, width].
      most: bytes of these that a device holds; None: `CHUNK_BYTES`.
    """
    rows, parts, mlp = _degrees(x.shape)
    graphdef, params, states, others = nnx.split(modules, nnx.Param, ScalingState, ...)
    held = x.shape[0] * x.shape[1] * width * x.dtype.itemsize // (rows * parts * mlp)
    length = x.shape[1] // parts
    count = _even(length, min(length, -(-held // (most or CHUNK_BYTES))))
    if count <= 1 or jax.tree.leaves(others):
        return apply(modules, x)
    rules, size = current_rules(), -(-length // count)

    def function(params: Any, states: Any, x: jax.Array) -> jax.Array:
        # The backward pass may be traced outside of the rules.
        with logical_axis_rules(rules) if rules is not None else contextlib.nullcontext():
            whole = x.reshape(x.shape[0], -1, x.shape[3])
            return apply(nnx.merge(graphdef, params, states, others), whole).reshape(x.shape)

    cut = x.reshape(x.shape[0], parts, length, x.shape[2])
    cut = jnp.pad(cut, ((0, 0), (0, 0), (0, -length % size), (0, 0))) if length % size else cut
    return _chunked(function, size, params, states, cut)[:, :, :length].reshape(x.shape)


def _degrees(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Into how many parts XLA partitions rows, sequence and the activations of an MLP."""
    rules = current_rules()
    if rules is None:
        return 1, 1, 1
    spec = rules.spec(("batch", "residual_length", "act_mlp"), (*shape[:2], 0))
    return tuple(rules.degree(axes_of(part)) for part in spec)


def _even(length: int, count: int) -> int:
    """`count`, or up to twice as many if these are equal chunks of the length."""
    return next((n for n in range(count, 2 * count + 1) if n and length % n == 0), count)


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
