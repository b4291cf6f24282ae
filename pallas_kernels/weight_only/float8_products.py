"""Products of FP8 numbers (W8A8): inputs rounded to e4m3 with one scale for each token, sums in float32.

FP8 tensor cores compute them at up to twice the rate of bfloat16. A product of few rows is limited by reading its
weights, and rounding its inputs would only add work: up to `MOST_EXACT_ROWS` rows they are multiplied as they are.
Gradients pass the rounding unchanged (the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
"""Largest magnitude of a rounded input, 448."""
MOST_EXACT_ROWS = 16
"""Largest number of rows of a product whose inputs are not rounded. On an H200 decoding steps of llama3-8b are faster
with exact inputs for 16 rows, and with rounded ones for 32 and 64."""
_FUSED_INPUTS = 8192
"""XLA rounds tokens of up to so many inputs in the kernel that computes them, such as a norm, in registers."""


def quantize_tokens(x: Float[Array, "rows in"]) -> tuple[Float[Array, "rows in"], Float[Array, "rows 1"]]:
    """Round the inputs of a dense layer to FP8 (e4m3) with one dynamic scale for each token: largest magnitude / 448.

    Returns:
      The FP8 numbers, and the float32 scales; a token of zeros has scale 1.
    """
    if x.shape[1] > _FUSED_INPUTS:
        # Longer tokens in bfloat16 XLA would store before they are rounded to it, in float32, and read them twice; the
        # barrier makes it store bfloat16.
        x = jax.lax.optimization_barrier(x)
    x = x.astype(jnp.float32)
    # Multiplied by 1/448: XLA rewrites a division by a constant so; written out, every program has the same bits.
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) * jnp.float32(1 / LARGEST)
    scales = jnp.where(scales > 0, scales, 1.0)
    return jnp.clip(x / scales, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scales


def round_tokens(x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
    """Return the values that inputs have after rounding to FP8 by `quantize_tokens`, in the dtype of x."""
    q, scales = quantize_tokens(x)
    return (q.astype(jnp.float32) * scales).astype(x.dtype)


def scaled_product(
    x: Float[Array, "rows in"], q: Float[Array, "out in"], scales: Float[Array, "out 1"]
) -> Float[Array, "rows out"]:
    """Multiply inputs rounded to FP8 with the transpose of an FP8 matrix; scale the sums by token and by output.

    Args:
      x: inputs, which are rounded here.
      q: the matrix.
      scales: its scales.

    Returns:
      The product, float32.
    """
    rounded, token_scales = quantize_tokens(x)
    return scale_sums(sum_products(rounded, q, x.dtype), token_scales, scales)


def sum_products(
    rounded: Float[Array, "rows in"], q: Float[Array, "out in"], dtype: jax.typing.DTypeLike
) -> Float[Array, "rows out"]:
    """Multiply FP8 numbers with the transpose of an FP8 matrix, summed in float32.

    Returns:
      The sums, not scaled. With a `dtype` of bfloat16 they are stored in it, which halves their bytes, else in float32.
    """
    stored = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    return jax.lax.dot_general(rounded, q, (((1,), (1,)), ((), ())), preferred_element_type=stored)


def scale_sums(
    sums: Float[Array, "rows out"], token_scales: Float[Array, "rows 1"], scales: Float[Array, "out 1"]
) -> Float[Array, "rows out"]:
    """Return the sums of `sum_products` times the scales of their tokens and outputs, in float32."""
    return sums.astype(jnp.float32) * token_scales * scales[:, 0].astype(jnp.float32)
