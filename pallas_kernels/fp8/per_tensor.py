"""FP8 products with one scale a tensor, of this step (current) or expected from the last ones (delayed).

Written as quantize, dequantize, multiply: on a Hopper GPU XLA makes one cuBLASLt FP8 matmul of each product; elsewhere
the same program computes with the same rounded numbers. FP8 matmuls take both operands with the summed dim contiguous,
so each input, weight and gradient is needed both ways round, which one kernel writes (`triton.cast_both`): the
transpose of the input is what the backward keeps.

Dims: `rows` and `outputs` stand for one or several dims, D for one or several summed ones, F feed-forward.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8.formats import (
    E4M3,
    GRADIENT_FORMATS,
    Quantized,
    absolute_maximum,
    as_bytes,
    dequantize,
    from_bytes,
    keep,
    quantize,
)
from pallas_kernels.fp8.plan import Plan
from pallas_kernels.fp8.sources import GIVEN, SWIGLU, SWIGLU_GRADIENTS, Raw, Source, input_source
from pallas_kernels.fp8.state import Seen
from pallas_kernels.fp8.triton import Both, cast_both, state_gradient
from pallas_kernels.target import automatic_axes

Weights = tuple[jax.Array, ...]
Values = tuple[Quantized | jax.Array, ...]
"""Of the weights, in E4M3 or to be rounded here, from whatever dtype."""
States = tuple[jax.Array | None, ...]
"""Of delayed scaling, one a weight, or all None for current scaling."""


class Used(NamedTuple):
    """What the backward of a product needs of its weight."""

    weight: Quantized
    state: jax.Array | None
    seen: tuple[jax.Array, jax.Array] | None
    """The magnitudes of the input and of the weight, where a state wants them."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    plan: Plan, x: jax.Array, raw: Raw, weights: Weights, values: Values, states: States
) -> tuple[jax.Array, ...]:
    """x [rows, D] times each weight [D, outputs]; x is quantised once.

    Gradients go to `weights`, which are not read, and have their dtype, that of x; what is multiplied are `values`. So
    is x not read where it is computed of `raw`.
    """
    return _forward(plan, x, raw, weights, values, states)[0]


def _forward(plan: Plan, x: jax.Array, raw: Raw, weights: Weights, values: Values, states: States) -> tuple[Any, ...]:
    both = _quantize_input(plan, x, raw, states)
    outs, used = _products(plan, both, values, states)
    return outs, (keep(both.turned), as_bytes(used))


def _backward(plan: Plan, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, used = from_bytes(saved)
    rows = x.values.ndim - plan.contracted
    both = _quantize_gradients(plan, gradients, rows, [u.state for u in used])
    d_x, d_weights, d_states = _gradients(plan, x, used, both, rows)
    return d_x, plan.none_of_raw, d_weights, tuple(None for _ in used), d_states


multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu_mlp(
    plan: Plan, x: jax.Array, raw: Raw, weights: Weights, values: Values, states: States
) -> tuple[jax.Array, ...]:
    """swiglu(x @ gate, x @ up) @ down, of x [rows, D] and (gate [D, F], up [D, F], down [F, outputs]).

    Between the products arrays as large as [rows, F] are written in FP8 only: the result of SwiGLU, and the gradients
    of gate and up. With current scaling they are rounded with a scale for each tile first, which gives their maxima.
    """
    return _mlp_forward(plan, x, raw, weights, values, states)[0]


def _mlp_forward(
    plan: Plan, x: jax.Array, raw: Raw, weights: Weights, values: Values, states: States
) -> tuple[Any, ...]:
    rows, both = x.ndim - 1, _quantize_input(plan, x, raw, states)
    wide, used = _products(dataclasses.replace(plan, output=plan.dtype), both, values[:2], states[:2])
    (hidden,) = _quantize_both(SWIGLU, wide, rows, E4M3, (_expected(states[2], 0),))
    outs, last = _products(plan, hidden, values[2:], states[2:])
    return outs, (keep(both.turned), keep(hidden.turned), wide, as_bytes((*used, *last)))


def _mlp_backward(plan: Plan, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, hidden, wide, used = from_bytes(saved)
    rows, states = x.values.ndim - 1, tuple(u.state for u in used)
    of_out = _quantize_gradients(plan, gradients, rows, states[2:])
    d_hidden, d_down, d_last = _gradients(plan, hidden, used[2:], of_out, rows)
    expected = [_expected(state, 2) for state in states[:2]]
    of_wide = _quantize_both(SWIGLU_GRADIENTS, (*wide, d_hidden), rows, GRADIENT_FORMATS[plan.gradients], expected)
    d_x, d_first, d_states = _gradients(plan, x, used[:2], of_wide, rows)
    return d_x, plan.none_of_raw, (*d_first, *d_down), tuple(None for _ in used), (*d_states, *d_last)


swiglu_mlp.defvjp(_mlp_forward, _mlp_backward)


def _products(plan: Plan, x: Both, values: Values, states: States) -> tuple[tuple[jax.Array, ...], tuple[Used, ...]]:
    outs, used = [], []
    for weight, state in zip(values, states, strict=True):
        if isinstance(weight, Quantized):
            # It has got its scale elsewhere.
            turned, maxima = Quantized(_turn(weight.values, plan.contracted), weight.inverse_scale), jnp.zeros(1)
        else:
            (both,) = _quantize_both(GIVEN, (weight,), plan.contracted, E4M3, (_expected(state, 1),))
            weight, turned, maxima = both
        outs.append(_dot(plan, x.values, turned, plan.contracted, plan.output))
        used.append(Used(weight, state, None if state is None else (x.maxima, maxima)))
    return tuple(outs), tuple(used)


def _gradients(
    plan: Plan, x: Quantized, used: Sequence[Used], gradients: Sequence[Both], rows: int
) -> tuple[jax.Array, tuple[jax.Array, ...], States]:
    """Of the input, the weights and the states, from those of the results; x is turned."""
    d_x = [_dot(plan, g.values, u.weight, g.values.values.ndim - rows) for g, u in zip(gradients, used, strict=True)]
    d_weights = tuple(_dot(plan, x, g.turned, rows) for g in gradients)
    d_states = tuple(
        None if u.seen is None or u.state is None else state_gradient(u.state, (*u.seen, g.maxima))
        for g, u in zip(gradients, used, strict=True)
    )
    # In this dtype and order XLA lets each product add to those before, in float32 before it rounds.
    return functools.reduce(lambda total, last: last + total, d_x), d_weights, d_states


def _expected(state: jax.Array | None, role: int) -> Seen | None:
    return None if state is None else Seen(state, role)


def _quantize_input(plan: Plan, x: jax.Array, raw: Raw, states: States) -> Both:
    source, arrays = input_source(plan.epsilon, x, raw)
    return _quantize_both(source, arrays, x.ndim - plan.contracted, E4M3, (_expected(states[0], 0),))[0]


def _quantize_gradients(plan: Plan, arrays: Sequence[jax.Array], rows: int, states: Sequence[Any]) -> list[Both]:
    dtype, both = GRADIENT_FORMATS[plan.gradients], []
    # Behind the barrier they are read once more for their maxima; before it XLA takes these into the kernel that
    # computes a gradient, and for that what fits there better out of it: the sums for a norm's weight.
    for x, state in zip(lax.optimization_barrier(tuple(arrays)), states, strict=True):
        both += _quantize_both(GIVEN, (x,), rows, dtype, (_expected(state, 2),))
    return both


def _quantize_both(
    source: Source, arrays: Sequence[jax.Array], first: int, dtype: Any, expected: Sequence[Seen | None]
) -> list[Both]:
    """What the source makes of the arrays, in the format, as it is and with its `first` dims behind the others."""
    shape = arrays[0].shape
    if automatic_axes():
        # Sharded dims must stay apart.
        found = []
        for x, seen in zip(source.compute(*arrays), expected, strict=True):
            values = quantize(x, dtype, seen and seen.amax)
            turned = Quantized(_turn(values.values, first), values.inverse_scale)
            found.append(Both(values, turned, absolute_maximum(x).reshape(1)))
        return found
    turned = (*shape[first:], *shape[:first])
    flat = [x.reshape(math.prod(shape[:first]), -1) if x.shape == shape else x.reshape(-1) for x in arrays]
    return [
        Both(_reshape(both.values, shape), _reshape(both.turned, turned), both.maxima)
        for both in cast_both(source, flat, dtype, expected)
    ]


def _reshape(x: Quantized, shape: tuple[int, ...]) -> Quantized:
    return Quantized(x.values.reshape(shape), x.inverse_scale)


def _turn(x: jax.Array, first: int) -> jax.Array:
    return jnp.transpose(x, (*range(first, x.ndim), *range(first)))


def _dot(plan: Plan, a: Quantized, b: Quantized, summed: int, output: str | None = None) -> jax.Array:
    """The product over the last `summed` dims of both.

    For `output`, or for a gradient, with every partial sum in float32 (at 12% less of the rate on an H200).
    """
    precision = lax.Precision.HIGHEST if output is None else lax.Precision.DEFAULT
    left, right = dequantize(a, plan.dtype), dequantize(b, plan.dtype)
    dims = tuple(range(left.ndim - summed, left.ndim)), tuple(range(right.ndim - summed, right.ndim))
    return lax.dot_general(
        left, right, (dims, ((), ())), precision=precision, preferred_element_type=output or plan.dtype
    )
