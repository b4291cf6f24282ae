"""XLA backend of the packed matmul: dequantization that XLA fuses on GPUs into a matmul that reads weights as stored.

On a GPU the conversion to the dtype of x, and the scales, become part of the matmul's prologue. Scales of groups, which
multiply the weights before the matmul, need the option `xla_gpu_experimental_enable_subchannel_dequantisation_fusion`;
without it XLA writes the weights in the dtype of x first. Either needs `xla_gpu_enable_triton_gemm`. Weights of a
lookup table, and those with 2:4 sparsity, are stored small, but written in the dtype of x before each product. With
inputs rounded to int8 (W8A8), XLA multiplies int8 by int8 with int32 sums, in a Triton or cuBLAS matmul; for one row,
in a fused reduction. With inputs rounded to FP8, of which there must be many rows, it multiplies FP8 by FP8 with
float32 sums.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.weight_only import float8_products
from pallas_kernels.weight_only.formats import (
    Arrays,
    BlockFloatFormat,
    Float8Format,
    Format,
    IntegerFormat,
    LookupFormat,
    LowRankFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    TileFloatFormat,
    TwoOfFourFormat,
    powers_of_two,
)
from pallas_kernels.weight_only.integer_products import quantize_tokens, round_tokens, scaled_product
from pallas_kernels.weight_only.request import PackedMatmulRequest

COMPILER_OPTIONS: Mapping[str, bool] = {
    "xla_gpu_enable_triton_gemm": True,
    "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
}
"""Options with which XLA reads packed weights as stored; a jaxlib that lacks one writes a copy of the weights."""
FLOAT8_OPTIONS: Mapping[str, bool] = {"xla_gpu_enable_triton_gemm": False}
"""Options with which XLA multiplies FP8 by FP8 in cuBLASLt, not in matmuls that it generates itself."""


def unsupported_reason(request: PackedMatmulRequest) -> str | None:
    """Return None: XLA can compute every matmul with a packed weight."""
    del request


def multiply(request: PackedMatmulRequest) -> Float[Array, "rows out"]:
    """Multiply x with the transposed packed matrix by XLA; gradients dequantize it once more."""
    weight = request.weight
    # Without `checkpoint` a train step keeps the matrix in the dtype of x from the forward pass to the backward pass.
    product = jax.checkpoint(_PRODUCTS[type(weight.format)], static_argnums=(2,))
    return product(request.x, weight.arrays, weight.format).astype(request.out_dtype)


def _times_transposed(x: Float[Array, "rows in"], w: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """Return x @ w.T, summed in float32."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _times_scaled(
    x: Float[Array, "rows in"], w: Float[Array, "out in"], scales: Float[Array, "out groups"]
) -> Float[Array, "rows out"]:
    outputs, groups = scales.shape
    if groups == 1:
        return _times_transposed(x, w) * scales[:, 0].astype(jnp.float32)
    w = w.reshape(outputs, groups, -1) * scales.astype(x.dtype)[:, :, None]
    return _times_transposed(x, w.reshape(outputs, -1))


def _times_integers(x: jax.Array, arrays: Arrays, _: Format) -> jax.Array:
    scales = arrays["scales"]
    y = _times_scaled(x, arrays["q"].astype(x.dtype), scales)
    if "zeros" not in arrays:
        return y
    # What zero points add depends on the sum of a group's inputs alone. Subtracted from the integers they would make
    # XLA write the weights in the dtype of x.
    sums = jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], scales.shape[1], -1), axis=-1)
    shifts = arrays["zeros"].astype(jnp.float32) * scales.astype(jnp.float32)
    return y - jnp.matmul(sums, shifts.T, precision=jax.lax.Precision.HIGHEST)


def _times_rounded(x: jax.Array, arrays: Arrays, format: Format) -> jax.Array:
    return _integer_product(x, arrays, format)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _integer_product(x: jax.Array, arrays: Arrays, format: Format) -> jax.Array:
    q, scales = quantize_tokens(x)
    dims = (((1,), (1,)), ((), ()))
    return scaled_product(q, scales, arrays["q"], arrays["scales"][:, 0].astype(jnp.float32), dims)


def _integer_product_forward(
    x: jax.Array, arrays: Arrays, format: Format
) -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
    return _integer_product(x, arrays, format), (x, arrays)


def _integer_product_backward(
    format: Format, saved: tuple[jax.Array, Arrays], d_y: jax.Array
) -> tuple[jax.Array, Arrays]:
    x, arrays = saved
    return jax.vjp(lambda x, arrays: _times_integers(x, arrays, format), round_tokens(x), arrays)[1](d_y)


_integer_product.defvjp(_integer_product_forward, _integer_product_backward)


def _times_float8(x: jax.Array, arrays: Arrays, format: Float8Format) -> jax.Array:
    if format.rows is not None:
        return _times_transposed(x, format.dense(arrays).astype(x.dtype))
    return _times_scaled(x, arrays["q"].astype(x.dtype), arrays["scales"])


def _times_rounded_float8(x: jax.Array, arrays: Arrays, format: Float8Format) -> jax.Array:
    few = len(x) <= float8_products.MOST_EXACT_ROWS
    return _times_float8(x, arrays, format) if few else _float8_product(x, arrays)


@jax.custom_vjp
def _float8_product(x: jax.Array, arrays: Arrays) -> jax.Array:
    return float8_products.scaled_product(x, arrays["q"], arrays["scales"])


def _float8_product_forward(x: jax.Array, arrays: Arrays) -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
    return _float8_product(x, arrays), (x, arrays)


def _float8_product_backward(saved: tuple[jax.Array, Arrays], d_y: jax.Array) -> tuple[jax.Array, Arrays]:
    x, arrays = saved
    exact = functools.partial(_times_float8, format=Float8Format())
    return jax.vjp(exact, float8_products.round_tokens(x), arrays)[1](d_y)


_float8_product.defvjp(_float8_product_forward, _float8_product_backward)


def _times_block_float(x: jax.Array, arrays: Arrays, _: Format) -> jax.Array:
    return _times_scaled(x, arrays["q"].astype(x.dtype), powers_of_two(arrays["exponents"]))


def _times_tile_float(x: jax.Array, arrays: Arrays, format: TileFloatFormat) -> jax.Array:
    # Products of integers of few bits and powers of two are exact in any dtype.
    return _times_transposed(x, arrays["q"].astype(x.dtype) * format.scales(arrays).astype(x.dtype))


def _times_written(x: jax.Array, arrays: Arrays, format: Format) -> jax.Array:
    # XLA fuses neither a gather nor a tree of selections into a matmul: it writes the values first.
    return _times_transposed(x, format.dense(arrays).astype(x.dtype))


def _times_low_rank(x: jax.Array, arrays: Arrays, _: Format) -> jax.Array:
    inner = _times_transposed(x, arrays["v"].astype(x.dtype)).astype(x.dtype)
    return _times_transposed(inner, arrays["u"].astype(x.dtype))


_PRODUCTS: Mapping[type[Format], Callable[[jax.Array, Arrays, Any], jax.Array]] = {
    IntegerFormat: _times_integers,
    RoundedInputFormat: _times_rounded,
    Float8Format: _times_float8,
    RoundedInputFloat8Format: _times_rounded_float8,
    LookupFormat: _times_written,
    BlockFloatFormat: _times_block_float,
    TileFloatFormat: _times_tile_float,
    LowRankFormat: _times_low_rank,
    TwoOfFourFormat: _times_written,
}
