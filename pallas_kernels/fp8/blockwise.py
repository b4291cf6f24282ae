"""FP8 matmuls with a scale for every 128 values (DeepSeek-V3, Liu et al., arXiv:2412.19437, section 3.3).

Along the contracted dim an activation or a gradient has one scale per 128 values of a row, a weight one per 128 x 128
values. All are E4M3: with scales this local the range of E5M2 is not needed. The contracted dim differs between the
matmuls (D in the forward, outputs for the input's gradient, rows for the weight's), so activations and gradients are
quantized twice, along their rows and along their columns, in one pass.

Arrays have two dims here: M rows, K contracted or input, N outputs. Scales are float32, [groups of the contracted dim,
...].
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_kernels.fp8.formats import (
    E4M3,
    Quantized,
    as_bytes,
    from_bytes,
    name_for_remat,
    power_of_two_scale,
    saturating_cast,
)
from pallas_kernels.fp8.options import Fp8Options
from pallas_kernels.fp8.sources import IDENTITY, SWIGLU, SWIGLU_GRADIENTS, NormInputs, Source, input_source
from pallas_kernels.target import automatic_axes

BLOCK = 128


Groups = jax.Array | None
"""Numbers of rows of the groups [G], which each have a matrix and start at multiples of 128 rows; None: one matrix."""


class Operations(NamedTuple):
    """Quantization and matmul functions of one backend of blockwise FP8; every array is two-dimensional."""

    quantize_both: Callable[[Source, Sequence[jax.Array], bool], list[tuple[Quantized, Quantized]]]
    """Quantize each x [M, K] that the source computes from the arrays, and its transpose [K, M].

    x has a scale per 128 values of a row; so has the transpose, or one per 128 x 128 if the last argument is True.
    """
    quantize_weight: Callable[[jax.Array], tuple[Quantized, jax.Array]]
    """Return weight [K, N] as `quantize_weight` does, and the transpose of its FP8 values."""
    rows: Callable[[Sequence[tuple[Quantized, Quantized]], Any, Groups], jax.Array]
    """Return the sum of a @ b.T [M, N] over pairs (a [M, K], b [N, K]), in the dtype given.

    With groups each row of a meets the matrix of its group: b is [N, G K] or [G N, K].
    """
    weights: Callable[[Quantized, Quantized, Any, Groups], jax.Array]
    """Return a @ b.T of a [D, M] and b [F, M], in the dtype given; with groups, each group's part of M apart [G D, F].

    a has a scale per 128 x 128 values.
    """


def quantize_rows(x: jax.Array) -> Quantized:
    """Quantize x [M, K] to E4M3 with one scale per 128 values of a row.

    Inverse scales are [K / 128, M] (K / 128 rounded up).
    """
    rows, width = x.shape
    grouped = _resized(x, rows, width + -width % BLOCK).reshape(rows, -1, BLOCK)
    scale = power_of_two_scale(jnp.max(jnp.abs(grouped), axis=2), E4M3)
    values = saturating_cast(grouped, scale[:, :, None], E4M3).reshape(rows, -1)
    return Quantized(_resized(values, rows, width), 1.0 / scale.T)


def quantize_both(source: Source, arrays: Sequence[jax.Array], shared: bool) -> list[tuple[Quantized, Quantized]]:
    """Return (x, x.T) in E4M3 for each x [M, K] that `source` computes, x with a scale per 128 values of a row.

    Args:
        source: function from the arrays to the operands.
        arrays: inputs of the source, of which the first is [M, K].
        shared: True if 128 x 128 values of x.T share a scale, False if it has one per 128 values of its rows too.
    """
    return [(quantize_rows(x), _quantize_transposed(x, shared)) for x in source.compute(*arrays)]


def _quantize_transposed(x: jax.Array, shared: bool) -> Quantized:
    if not shared:
        return quantize_rows(x.T)
    values, inverse = quantize_weight(x)
    return Quantized(values.T, inverse)


def quantize_weight(weight: jax.Array) -> Quantized:
    """Quantize a weight [K, N] to E4M3 with one scale per 128 x 128 values.

    Inverse scales are [K / 128, N / 128] (rounded up).
    """
    inner, outputs = weight.shape
    padded = _resized(weight, inner + -inner % BLOCK, outputs + -outputs % BLOCK)
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = power_of_two_scale(jnp.max(jnp.abs(blocks), axis=(1, 3)), E4M3)
    values = saturating_cast(blocks, scale[:, None, :, None], E4M3).reshape(padded.shape)
    return Quantized(_resized(values, inner, outputs), 1.0 / scale)


def quantize_weight_both(weight: jax.Array) -> tuple[Quantized, jax.Array]:
    """Quantize a weight [K, N] to E4M3 with one scale per 128 x 128 values; also return the transposed FP8 values."""
    found = quantize_weight(weight)
    return found, found.values.T


def multiply_dequantized(pairs: Sequence[tuple[Quantized, Quantized]], dtype: DTypeLike) -> jax.Array:
    """Dequantize blockwise FP8 operands, and sum their products a [M, K] @ b [N, K].T in float32."""
    contracted = (((1,), (1,)), ((), ()))
    wide = dtype if len(pairs) == 1 else jnp.float32
    plain = [(dequantize_blocks(a, dtype), dequantize_blocks(b, dtype)) for a, b in pairs]
    products = [lax.dot_general(a, b, contracted, preferred_element_type=wide) for a, b in plain]
    return functools.reduce(jnp.add, products).astype(dtype)


def dequantize_blocks(x: Quantized, dtype: DTypeLike) -> jax.Array:
    """Dequantize blockwise FP8 values [M, K], whose scales are one per 128 values of a row or per 128 x 128 values."""
    values, inverse = x
    rows, width = values.shape
    if inverse.shape[1] != rows:
        inverse = _resized(jnp.repeat(inverse, BLOCK, axis=1), len(inverse), rows)
    return values.astype(dtype) * _resized(jnp.repeat(inverse.T, BLOCK, axis=1), rows, width).astype(dtype)


def _resized(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Return x [M, K] padded with zeros, or cut, at the ends of its dims to the shape [rows, columns]."""
    changes = rows - x.shape[0], columns - x.shape[1]

    def resize(x):
        return jnp.pad(x, [(0, max(c, 0)) for c in changes])[:rows, :columns]

    if not any(changes) or not automatic_axes():
        return resize(x)
    # Gathered for the resize: XLA would move parts by permutes, which its CPU backend cannot run in a pipeline stage.
    whole = P(*(None if change else P.UNCONSTRAINED for change in changes))
    return lax.with_sharding_constraint(resize(lax.with_sharding_constraint(x, whole)), whole)


def multiply(
    operations: Operations,
    options: Fp8Options,
    x: jax.Array,
    norm_inputs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized | None, ...],
    *,
    mlp: bool = False,
    groups: Groups = None,
) -> tuple[jax.Array, ...]:
    """Multiply x [rows, D] with each weight [D, outputs] in blockwise FP8, quantizing x once.

    Rows, D and outputs may each be several dims, which are merged. With `groups` a weight is [G, D, outputs].

    With `mlp` compute swiglu(x @ gate, x @ up) @ down from three weights: SwiGLU and its gradients are stored in FP8
    only. A weight given in `quantized` was quantized as a matrix [D, outputs] by `quantize_weight`.
    """
    rows = x.shape[: x.ndim - options.contracted]
    inner = options.contracted + (groups is not None)
    matrices = tuple(w.reshape(math.prod(w.shape[:inner]), -1) for w in weights)
    given = tuple(
        operations.quantize_weight(lax.stop_gradient(w)) if q is None else _with_transpose(q, w)
        for w, q in zip(matrices, quantized, strict=True)
    )
    carriers = tuple(w.astype(options.dtype) for w in matrices)
    function = cast(Callable[..., tuple[jax.Array, ...]], _swiglu_mlp if mlp else _multiply)
    width = math.prod(x.shape[len(rows) :])
    flat = [array.reshape(-1, width) if array.shape == x.shape else array for array in (x, *norm_inputs)]
    results = function(operations, options, flat[0], tuple(flat[1:]), carriers, given, groups)
    outputs = [w.shape[inner:] for w in weights[-len(results) :]]
    return tuple(y.reshape(*rows, *dims) for y, dims in zip(results, outputs, strict=True))


QuantizedWeights = tuple[tuple[Quantized, jax.Array], ...]
"""The quantized weights, each with the transpose of its FP8 values."""


def _with_transpose(q: Quantized, weight: jax.Array) -> tuple[Quantized, jax.Array]:
    values = q.values.reshape(weight.shape)
    return Quantized(values, q.inverse_scale), values.T


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    operations: Operations,
    options: Fp8Options,
    x: jax.Array,
    norm_inputs: NormInputs,
    weights: tuple[jax.Array, ...],
    given: QuantizedWeights,
    groups: Groups,
) -> tuple[jax.Array, ...]:
    return _forward(operations, options, x, norm_inputs, weights, given, groups)[0]


def _forward(
    operations: Operations,
    options: Fp8Options,
    x: jax.Array,
    norm_inputs: NormInputs,
    weights: tuple[jax.Array, ...],
    given: QuantizedWeights,
    groups: Groups,
) -> tuple[tuple[jax.Array, ...], Any]:
    del weights
    ((by_rows, transposed),) = operations.quantize_both(*input_source(options.epsilon, x, norm_inputs), True)
    return _products(operations, options.output, by_rows, given, groups), (
        name_for_remat(transposed),
        as_bytes([w for w, _ in given]),
        groups,
    )


def _backward(
    operations: Operations, options: Fp8Options, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    transposed_x, weights, groups = from_bytes(saved)
    both = [operations.quantize_both(IDENTITY, (gradient,), False)[0] for gradient in gradients]
    d_x, d_weights = _gradients(operations, options, transposed_x, weights, both, groups)
    return d_x, options.no_norm_input_gradients, d_weights, (None,) * len(weights), None


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _swiglu_mlp(
    operations: Operations,
    options: Fp8Options,
    x: jax.Array,
    norm_inputs: NormInputs,
    weights: tuple[jax.Array, ...],
    given: QuantizedWeights,
    groups: Groups,
) -> tuple[jax.Array, ...]:
    return _mlp_forward(operations, options, x, norm_inputs, weights, given, groups)[0]


def _mlp_forward(
    operations: Operations,
    options: Fp8Options,
    x: jax.Array,
    norm_inputs: NormInputs,
    weights: tuple[jax.Array, ...],
    given: QuantizedWeights,
    groups: Groups,
) -> tuple[tuple[jax.Array, ...], Any]:
    del weights
    ((by_rows, transposed),) = operations.quantize_both(*input_source(options.epsilon, x, norm_inputs), True)
    wide = _products(operations, options.dtype, by_rows, given[:2], groups)
    ((hidden, transposed_hidden),) = operations.quantize_both(SWIGLU, wide, True)
    outs = _products(operations, options.output, hidden, given[2:], groups)
    return outs, (
        name_for_remat(transposed),
        wide,
        name_for_remat(transposed_hidden),
        as_bytes([w for w, _ in given]),
        groups,
    )


def _mlp_backward(
    operations: Operations, options: Fp8Options, saved: tuple[Any, ...], gradients: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    transposed_x, wide, transposed_hidden, weights, groups = from_bytes(saved)
    quantized_d_out = operations.quantize_both(IDENTITY, gradients, False)
    d_hidden, d_down = _gradients(operations, options, transposed_hidden, weights[2:], quantized_d_out, groups)
    quantized_d_wide = operations.quantize_both(SWIGLU_GRADIENTS, (*wide, d_hidden), False)
    d_x, d_first = _gradients(operations, options, transposed_x, weights[:2], quantized_d_wide, groups)
    return d_x, options.no_norm_input_gradients, (*d_first, *d_down), (None,) * len(weights), None


_swiglu_mlp.defvjp(_mlp_forward, _mlp_backward)


def _products(
    operations: Operations, dtype: str, x: Quantized, given: QuantizedWeights, groups: Groups
) -> tuple[jax.Array, ...]:
    pairs = [(x, Quantized(transposed, weight.inverse_scale)) for weight, transposed in given]
    return tuple(operations.rows([pair], dtype, groups) for pair in pairs)


def _gradients(
    operations: Operations,
    options: Fp8Options,
    transposed_x: Quantized,
    weights: Sequence[Quantized],
    gradients: Sequence[tuple[Quantized, Quantized]],
    groups: Groups,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the gradients (d_x, d_weights) of a blockwise FP8 matmul, from the quantized gradients of its results."""
    pairs = [
        (by_rows, Quantized(weight.values, weight.inverse_scale.T))
        for (by_rows, _), weight in zip(gradients, weights, strict=True)
    ]
    d_weights = tuple(operations.weights(transposed_x, d_out, options.dtype, groups) for _, d_out in gradients)
    return operations.rows(pairs, options.dtype, groups), d_weights


def dense(product: Callable[[Sequence[tuple[Quantized, Quantized]], Any], jax.Array]) -> tuple[Callable, Callable]:
    """Return `Operations.rows` and `Operations.weights` for one matrix, from product(pairs, dtype)."""
    return (
        lambda pairs, dtype, groups: product(pairs, dtype),
        lambda a, b, dtype, groups: product([(a, b)], dtype),
    )


XLA = Operations(quantize_both, quantize_weight_both, *dense(multiply_dequantized))
