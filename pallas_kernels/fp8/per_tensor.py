"""FP8 products with one scale a tensor, of this step (current) or expected from the last ones (delayed).

Written as quantize, dequantize, multiply: on a Hopper GPU XLA makes one cuBLASLt FP8 matmul of each product and one
fusion of each quantisation, which writes an array and its transpose; elsewhere the same program computes with the same
rounded numbers. FP8 matmuls take both operands with the summed dim contiguous, so each input and each gradient is
needed both ways round: the transpose of the input is what the backward keeps.

Dims: `rows` and `outputs` stand for one or several dims, D for one or several summed ones.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8.formats import E4M3, GRADIENT_FORMATS, Quantized, dequantize, keep, quantize
from pallas_kernels.fp8.state import expected_amax, observed_amax, state_gradient


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a call.

    Attributes:
        contracted: how many dims are summed over: the last of the input, the first of each weight.
        dtype: of the arguments and their gradients: bfloat16 or float32.
      output: of the results.
        gradients: "e5m2" or "e4m3".
    """

    contracted: int
    dtype: str
    output: str
    gradients: str = "e5m2"


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
    q_x = quantize(x, E4M3, None if shared is None else expected_amax(shared, 0))
    rows, outs, q_weights, seen = x.ndim - plan.contracted, [], [], []
    for weight, given, state in zip(weights, quantized, states, strict=True):
        # A weight that comes quantised has got its scale elsewhere.
        weight_seen = jnp.float32(0)
        if given is None:
            given = quantize(weight, E4M3, None if state is None else expected_amax(state, 1))
            weight_seen = weight_seen if state is None else observed_amax(given)
        if state is not None:
            seen.append((observed_amax(q_x), weight_seen))
        dims = tuple(range(rows, x.ndim)), tuple(range(plan.contracted))
        outs.append(_dot(plan, q_x, given, dims, plan.output))
        q_weights.append(given)
    order = (*range(rows, x.ndim), *range(rows))
    turned = keep(Quantized(jnp.transpose(q_x.values, order), q_x.inverse_scale))
    return tuple(outs), (turned, tuple(q_weights), states, tuple(seen))


def _backward(plan: Plan, saved: Saved, gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, q_weights, states, seen = saved
    d_x, d_weights, d_states = [], [], []
    for index, (gradient, weight, state) in enumerate(zip(gradients, q_weights, states, strict=True)):
        expected = None if state is None else expected_amax(state, 2)
        q_gradient = quantize(gradient, GRADIENT_FORMATS[plan.gradients], expected)
        rows = x.values.ndim - plan.contracted
        outputs = gradient.ndim - rows
        dims = tuple(range(rows, gradient.ndim)), tuple(range(plan.contracted, plan.contracted + outputs))
        d_x.append(_dot(plan, q_gradient, weight, dims))
        dims = tuple(range(plan.contracted, x.values.ndim)), tuple(range(rows))
        d_weights.append(_dot(plan, x, q_gradient, dims))
        if state is not None:
            d_states.append(state_gradient(state, (*seen[index], observed_amax(q_gradient))))
    nothing = tuple(None for _ in q_weights)
    # In this dtype XLA lets each product add to the one before, in float32 before it rounds.
    return functools.reduce(jnp.add, d_x), tuple(d_weights), nothing, tuple(d_states) or nothing


multiply.defvjp(_forward, _backward)


def _dot(
    plan: Plan, a: Quantized, b: Quantized, dims: tuple[Sequence[int], Sequence[int]], output: str | None = None
) -> jax.Array:
    """The product for `output`, or for a gradient, with every partial sum in float32 (at some percent of the rate)."""
    precision = lax.Precision.HIGHEST if output is None else lax.Precision.DEFAULT
    left, right = dequantize(a, plan.dtype), dequantize(b, plan.dtype)
    return lax.dot_general(
        left, right, (dims, ((), ())), precision=precision, preferred_element_type=output or plan.dtype
    )
