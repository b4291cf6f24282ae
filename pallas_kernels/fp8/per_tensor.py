"""FP8 matmuls with one scale per tensor, set by its largest magnitude now (current) or in past steps (delayed).

A matmul is written as quantize, dequantize, multiply: on a Hopper GPU XLA compiles that to one cuBLASLt FP8 matmul;
elsewhere the same program computes with the same quantized numbers. FP8 matmuls need the contracted dim contiguous in
both operands, so each input, weight and gradient is needed in both orders, which one kernel writes
(`triton.cast_both`); the backward saves the transpose of the input.

Dims: `rows` and `outputs` represent one or several dims, D for one or several contracted ones, F feed-forward.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp8.formats import (
    E4M3,
    GRADIENT_FORMATS,
    Quantized,
    absolute_maximum,
    as_bytes,
    dequantize,
    from_bytes,
    name_for_remat,
    quantize,
)
from pallas_kernels.fp8.options import Fp8Options
from pallas_kernels.fp8.sources import IDENTITY, SWIGLU, SWIGLU_GRADIENTS, NormInputs, Source, input_source
from pallas_kernels.fp8.state import AmaxHistory
from pallas_kernels.fp8.triton import QuantizedWithTranspose, cast_both, state_gradient
from pallas_kernels.target import automatic_axes

Weights = tuple[jax.Array, ...]
Values = tuple[Quantized | jax.Array, ...]
"""The weights in E4M3, or in any dtype if they are to be quantized here."""
States = tuple[jax.Array | None, ...]
"""The states of delayed scaling, one per weight; all None with current scaling."""


class WeightResiduals(NamedTuple):
    """Values of one weight that the forward pass of a matmul saves for the backward pass."""

    weight: Quantized
    state: jax.Array | None
    maxima: tuple[jax.Array, jax.Array] | None
    """The magnitudes of the input and of the weight, if there is a state."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    options: Fp8Options, x: jax.Array, norm_inputs: NormInputs, weights: Weights, values: Values, states: States
) -> tuple[jax.Array, ...]:
    """Multiply x [rows, D] with each weight [D, outputs] in FP8 with one scale per tensor, quantizing x once.

    The matmuls use `values`; `weights` only receive the gradients, in their dtype, that of x. With `norm_inputs`, x
    likewise only receives its gradient.
    """
    return _forward(options, x, norm_inputs, weights, values, states)[0]


def _forward(
    options: Fp8Options, x: jax.Array, norm_inputs: NormInputs, weights: Weights, values: Values, states: States
) -> tuple[Any, ...]:
    both = _quantize_input(options, x, norm_inputs, states)
    outs, used = _products(options, both, values, states)
    return outs, (name_for_remat(both.transposed), as_bytes(used))


def _backward(options: Fp8Options, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, used = from_bytes(saved)
    rows = x.values.ndim - options.contracted
    both = _quantize_gradients(options, gradients, rows, [u.state for u in used])
    d_x, d_weights, d_states = _gradients(options, x, used, both, rows)
    return d_x, options.no_norm_input_gradients, d_weights, tuple(None for _ in used), d_states


multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swiglu_mlp(
    options: Fp8Options, x: jax.Array, norm_inputs: NormInputs, weights: Weights, values: Values, states: States
) -> tuple[jax.Array, ...]:
    """Compute swiglu(x @ gate, x @ up) @ down in FP8, of x [rows, D], gate and up [D, F], down [F, outputs].

    The arrays of size [rows, F] between the matmuls, SwiGLU and the gradients of gate and up, are stored in FP8 only.
    With current scaling they are first quantized with a scale per tile, which yields their maxima.
    """
    return _mlp_forward(options, x, norm_inputs, weights, values, states)[0]


def _mlp_forward(
    options: Fp8Options, x: jax.Array, norm_inputs: NormInputs, weights: Weights, values: Values, states: States
) -> tuple[Any, ...]:
    rows = x.ndim - 1
    both = _quantize_input(options, x, norm_inputs, states)
    wide, used = _products(dataclasses.replace(options, output=options.dtype), both, values[:2], states[:2])
    (hidden,) = _quantize_both(SWIGLU, wide, rows, E4M3, (_amax_history(states[2], 0),))
    outs, last = _products(options, hidden, values[2:], states[2:])
    return outs, (
        name_for_remat(both.transposed),
        name_for_remat(hidden.transposed),
        wide,
        as_bytes((*used, *last)),
    )


def _mlp_backward(options: Fp8Options, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    x, hidden, wide, used = from_bytes(saved)
    rows = x.values.ndim - 1
    states = tuple(u.state for u in used)
    quantized_d_out = _quantize_gradients(options, gradients, rows, states[2:])
    d_hidden, d_down, d_last = _gradients(options, hidden, used[2:], quantized_d_out, rows)
    expected = [_amax_history(state, 2) for state in states[:2]]
    quantized_d_wide = _quantize_both(
        SWIGLU_GRADIENTS, (*wide, d_hidden), rows, GRADIENT_FORMATS[options.gradients], expected
    )
    d_x, d_first, d_states = _gradients(options, x, used[:2], quantized_d_wide, rows)
    return d_x, options.no_norm_input_gradients, (*d_first, *d_down), tuple(None for _ in used), (*d_states, *d_last)


swiglu_mlp.defvjp(_mlp_forward, _mlp_backward)


def _products(
    options: Fp8Options, x: QuantizedWithTranspose, values: Values, states: States
) -> tuple[tuple[jax.Array, ...], tuple[WeightResiduals, ...]]:
    outs = []
    used = []
    for weight, state in zip(values, states, strict=True):
        if isinstance(weight, Quantized):
            # A weight quantized by the caller has its scale already.
            transposed = Quantized(_move_to_end(weight.values, options.contracted), weight.inverse_scale)
            maxima = jnp.zeros(1)
        else:
            (both,) = _quantize_both(IDENTITY, (weight,), options.contracted, E4M3, (_amax_history(state, 1),))
            weight, transposed, maxima = both
        outs.append(_dot(options, x.values, transposed, options.contracted, options.output))
        used.append(WeightResiduals(weight, state, None if state is None else (x.maxima, maxima)))
    return tuple(outs), tuple(used)


def _gradients(
    options: Fp8Options,
    x: Quantized,
    used: Sequence[WeightResiduals],
    gradients: Sequence[QuantizedWithTranspose],
    rows: int,
) -> tuple[jax.Array, tuple[jax.Array, ...], States]:
    """Return the gradients (d_x, d_weights, d_states) of an FP8 matmul, from the quantized gradients of its results.

    `x` is the transposed, quantized input of the matmul.
    """
    d_x = [_dot(options, g.values, u.weight, g.values.values.ndim - rows) for g, u in zip(gradients, used, strict=True)]
    d_weights = tuple(_dot(options, x, g.transposed, rows) for g in gradients)
    d_states = tuple(
        None if u.maxima is None or u.state is None else state_gradient(u.state, (*u.maxima, g.maxima))
        for g, u in zip(gradients, used, strict=True)
    )
    # In this dtype and order XLA fuses each addition into the matmul, which adds in float32 before it rounds.
    return functools.reduce(lambda total, last: last + total, d_x), d_weights, d_states


def _amax_history(state: jax.Array | None, role: int) -> AmaxHistory | None:
    return None if state is None else AmaxHistory(state, role)


def _quantize_input(
    options: Fp8Options, x: jax.Array, norm_inputs: NormInputs, states: States
) -> QuantizedWithTranspose:
    source, arrays = input_source(options.epsilon, x, norm_inputs)
    return _quantize_both(source, arrays, x.ndim - options.contracted, E4M3, (_amax_history(states[0], 0),))[0]


def _quantize_gradients(
    options: Fp8Options, arrays: Sequence[jax.Array], rows: int, states: Sequence[jax.Array | None]
) -> list[QuantizedWithTranspose]:
    dtype = GRADIENT_FORMATS[options.gradients]
    both = []
    # The barrier costs one more read for the maxima. Without it XLA fuses these into the kernel that computes a
    # gradient, and then moves the sums for a norm's weight, which fit there better, out of that kernel.
    for x, state in zip(lax.optimization_barrier(tuple(arrays)), states, strict=True):
        both += _quantize_both(IDENTITY, (x,), rows, dtype, (_amax_history(state, 2),))
    return both


def _quantize_both(
    source: Source, arrays: Sequence[jax.Array], first: int, dtype: DTypeLike, expected: Sequence[AmaxHistory | None]
) -> list[QuantizedWithTranspose]:
    """Quantize each array that `source` computes, and a copy of it with the `first` leading dims moved to the end."""
    shape = arrays[0].shape
    if automatic_axes():
        # Sharded dims must not be merged.
        found = []
        for x, history in zip(source.compute(*arrays), expected, strict=True):
            values = quantize(x, dtype, history and history.amax)
            transposed = Quantized(_move_to_end(values.values, first), values.inverse_scale)
            found.append(QuantizedWithTranspose(values, transposed, absolute_maximum(x).reshape(1)))
        return found
    transposed = (*shape[first:], *shape[:first])
    flat = [x.reshape(math.prod(shape[:first]), -1) if x.shape == shape else x.reshape(-1) for x in arrays]
    return [
        QuantizedWithTranspose(_reshape(both.values, shape), _reshape(both.transposed, transposed), both.maxima)
        for both in cast_both(source, flat, dtype, expected)
    ]


def _reshape(x: Quantized, shape: tuple[int, ...]) -> Quantized:
    return Quantized(x.values.reshape(shape), x.inverse_scale)


def _move_to_end(x: jax.Array, first: int) -> jax.Array:
    """Move the `first` leading dims of x to the end."""
    return jnp.transpose(x, (*range(first, x.ndim), *range(first)))


def _dot(options: Fp8Options, a: Quantized, b: Quantized, contracted: int, output: str | None = None) -> jax.Array:
    """Multiply two FP8 arrays over the last `contracted` dims of both.

    If `output` is None the product is a gradient, with every partial sum in float32 (at 12 % less speed on an H200).
    """
    precision = lax.Precision.HIGHEST if output is None else lax.Precision.DEFAULT
    left = dequantize(a, options.dtype)
    right = dequantize(b, options.dtype)
    dims = tuple(range(left.ndim - contracted, left.ndim)), tuple(range(right.ndim - contracted, right.ndim))
    return lax.dot_general(
        left, right, (dims, ((), ())), precision=precision, preferred_element_type=output or options.dtype
    )
