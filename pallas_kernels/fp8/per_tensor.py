"""FP8 products with one scale a tensor, of this step (current) or expected from the last ones (delayed).

Written as quantize, dequantize, multiply: on a Hopper GPU XLA makes one cuBLASLt FP8 matmul of each product; elsewhere
the same program computes with the same rounded numbers. FP8 matmuls take both operands with the summed dim contiguous,
so each input, weight and gradient is needed both ways round, which one kernel writes (`triton.cast_both`): the
transpose of the input is what the backward keeps.

Dims: `rows` and `outputs` stand for one or several dims, D for one or several summed ones.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8.formats import (
    E4M3,
    GRADIENT_FORMATS,
    Quantized,
    absolute_maximum,
    dequantize,
    keep,
    power_of_two_scale,
    saturating_cast,
)
from pallas_kernels.fp8.plan import Plan
from pallas_kernels.fp8.state import expected_amax, observed_amax, state_gradient
from pallas_kernels.fp8.triton import cast_both
from pallas_kernels.target import automatic_axes

Saved = tuple[Quantized, tuple[Quantized, ...], tuple[Any, ...], tuple[tuple[jax.Array, jax.Array], ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    plan: Plan,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized | None, ...],
    states: tuple[jax.Array | None, ...],
) -> tuple[jax.Array, ...]:
    """x times each weight; x is quantised once.

    Args:
        x: [rows, D].
        weights: each [D, outputs]; of one that comes `quantized` only the gradient's way is used, not the value.
        quantized: the weights in E4M3, or None to quantise here.
        states: of delayed scaling, one a weight, or all None for current scaling.
    """
    return _forward(plan, x, weights, quantized, states)[0]


def _forward(
    plan: Plan,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized | None, ...],
    states: tuple[jax.Array | None, ...],
) -> tuple[tuple[jax.Array, ...], Saved]:
    shared = states[0]
    rows, outs, q_weights, seen = x.ndim - plan.contracted, [], [], []
    q_x, turned_x = _quantize_both(x, rows, E4M3, None if shared is None else expected_amax(shared, 0))
    for weight, given, state in zip(weights, quantized, states, strict=True):
        # A weight that comes quantised has got its scale elsewhere.
        weight_seen = jnp.float32(0)
        if given is None:
            expected = None if state is None else expected_amax(state, 1)
            given, turned = _quantize_both(weight, plan.contracted, E4M3, expected)
            weight_seen = weight_seen if state is None else observed_amax(given)
        else:
            turned = Quantized(_turn(given.values, plan.contracted), given.inverse_scale)
        if state is not None:
            seen.append((observed_amax(q_x), weight_seen))
        outs.append(_dot(plan, q_x, turned, plan.contracted, plan.output))
        q_weights.append(given)
    return tuple(outs), (keep(turned_x), tuple(q_weights), states, tuple(seen))


def _backward(plan: Plan, saved: Saved, gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, q_weights, states, seen = saved
    d_x, d_weights, d_states = [], [], []
    for index, (gradient, weight, state) in enumerate(zip(gradients, q_weights, states, strict=True)):
        expected = None if state is None else expected_amax(state, 2)
        rows = x.values.ndim - plan.contracted
        q_gradient, turned = _quantize_both(gradient, rows, GRADIENT_FORMATS[plan.gradients], expected)
        d_x.append(_dot(plan, q_gradient, weight, gradient.ndim - rows))
        d_weights.append(_dot(plan, x, turned, rows))
        if state is not None:
            d_states.append(state_gradient(state, (*seen[index], observed_amax(q_gradient))))
    nothing = tuple(None for _ in q_weights)
    # In this dtype XLA lets each product add to the one before, in float32 before it rounds.
    return functools.reduce(jnp.add, d_x), tuple(d_weights), nothing, tuple(d_states) or nothing


multiply.defvjp(_forward, _backward)


def _quantize_both(x: jax.Array, first: int, dtype: Any, amax: jax.Array | None) -> tuple[Quantized, Quantized]:
    """x in the format, as it is and with its `first` dims behind the others."""
    scale = power_of_two_scale(absolute_maximum(x) if amax is None else amax, dtype)
    if automatic_axes():
        # Sharded dims must stay apart.
        values = saturating_cast(x, scale, dtype)
        turned = _turn(values, first)
    else:
        values, turned = cast_both(x.reshape(math.prod(x.shape[:first]), -1), scale, dtype)
        values, turned = values.reshape(x.shape), turned.reshape(*x.shape[first:], *x.shape[:first])
    return Quantized(values, 1.0 / scale), Quantized(turned, 1.0 / scale)


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
