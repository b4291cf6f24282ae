"""Products of 8-bit integers (W8A8): inputs rounded to int8 with one scale for each token, sums in int32.

The sums of a product are exact, and so independent of the layout over devices and of the program that computes them.
Gradients pass the rounding unchanged (the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from pallas_kernels.weight_only.rounding_grid import Grid

GRID = Grid(8)
"""Grid of the weights: one scale for each output."""
LARGEST = 127
"""Largest integer of a rounded input; the smallest is its negative."""
MOST_INPUTS = (2**31 - 1) // (LARGEST * -GRID.limits[0])
"""Largest number of inputs of a layer whose int32 sums cannot overflow."""


def unsupported_inputs(inputs: int) -> str | None:
    """Return why int8 products over `inputs` inputs can overflow int32, or None if they cannot."""
    if inputs <= MOST_INPUTS:
        return None
    return f"int8 products summed over {inputs:,} inputs can overflow int32 (at most {MOST_INPUTS:,})"


def quantize_tokens(x: Float[Array, "..."], contracted: int = 1) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Round the inputs of a dense layer to int8 with one dynamic scale for each token: largest magnitude / 127.

    Args:
      x: inputs [*tokens, *in].
      contracted: number of dims of `in`.

    Returns:
      The integers, from -127 to 127, and the float32 scales [*tokens, 1, ...]; a token of zeros has scale 1.
    """
    x = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - contracted, x.ndim))
    # Multiplied by 1/127: XLA rewrites a division by a constant so; written out, every program has the same bits.
    scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True) * jnp.float32(1 / LARGEST)
    scales = jnp.where(scales > 0, scales, 1.0)
    return jnp.clip(jnp.round(x / scales), -LARGEST, LARGEST).astype(jnp.int8), scales


def round_tokens(x: Float[Array, "..."], contracted: int = 1) -> Float[Array, "..."]:
    """Return the values that inputs have after rounding to int8 by `quantize_tokens`, in the dtype of x."""
    q, scales = quantize_tokens(x, contracted)
    return (q.astype(jnp.float32) * scales).astype(x.dtype)


def recover_integers(w: Float[Array, "..."], contracted: int = 1) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Split weights that `Grid(8).round` has rounded into the same integers and scales again, exactly.

    Args:
      w: float32 weights [*in, *out], with a scale for each output.
      contracted: number of dims of `in`.

    Returns:
      The integers [*in, *out], and the float32 scales [1, ..., *out].
    """
    w = w.astype(jnp.float32)
    axes, (low, high) = tuple(range(contracted)), GRID.limits
    largest = jnp.max(jnp.abs(w), axis=axes, keepdims=True)
    # The largest integer of an output is 127 or -128, and scales are bfloat16 numbers: of the two candidates the first
    # is taken where it reproduces the weights. Products of a bfloat16 number and an integer of 8 bits are exact.
    scales = (largest / high).astype(jnp.bfloat16).astype(jnp.float32)
    scales = jnp.where(scales > 0, scales, 1.0)
    fits = jnp.all(jnp.round(w / scales) * scales == w, axis=axes, keepdims=True)
    scales = jnp.where(fits, scales, largest / -low)
    return jnp.clip(jnp.round(w / scales), low, high).astype(jnp.int8), scales


def scaled_product(
    q: Int8[Array, "..."],
    scales: Float[Array, "..."],
    w: Int8[Array, "..."],
    w_scales: Float[Array, "..."],
    dimension_numbers: jax.lax.DotDimensionNumbers,
) -> Float[Array, "..."]:
    """Multiply int8 matrices with int32 sums, and scale these in float32, by token and by output.

    Args:
      q, w: the integers.
      scales, w_scales: float32, broadcastable to the shape of the product.
      dimension_numbers: as in `jax.lax.dot_general`.
    """
    return scale_sums(jax.lax.dot_general(q, w, dimension_numbers, preferred_element_type=jnp.int32), scales, w_scales)


def scale_sums(
    sums: Int32[Array, "..."], scales: Float[Array, "..."], w_scales: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Scale int32 sums in float32, by token and then by output: always in this order, for the same bits."""
    return sums.astype(jnp.float32) * scales * w_scales


def int8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: jax.lax.DotDimensionNumbers,
    **options: object,
) -> Float[Array, "..."]:
    """Multiply like `jax.lax.dot_general` in int8: the training counterpart of a W8A8 layer.

    Inputs are rounded with one scale for each token (`quantize_tokens`); weights have been rounded before, by
    `Grid(8).round`. The result has the bits of `packed_matmul` with the packed weight. The gradient is that of a
    product, in the dtype of `lhs`, of the rounded inputs and the weight cast to that dtype; it passes the rounding of
    the inputs unchanged (straight-through).

    Args:
      lhs: inputs [*tokens, *in].
      rhs: weights [*in, *out] with values of the grid, in float32: bfloat16 cannot hold them.
      dimension_numbers: contracts the last dims of `lhs` with the first of `rhs`.
      options: further arguments of `dot_general` (`precision`, `preferred_element_type`), which are ignored: sums are
        int32, and the result has the dtype of `lhs`.

    Returns:
      The product [*tokens, *out], in the dtype of `lhs`.

    Raises:
      ValueError: `dimension_numbers` are others, or the weights are not in float32.
    """
    del options
    ((left, right), batch) = dimension_numbers
    count = len(right)
    if any(batch) or tuple(left) != tuple(range(lhs.ndim - count, lhs.ndim)) or tuple(right) != tuple(range(count)):
        raise ValueError(f"int8 products contract x's last dims with the weight's first, not {dimension_numbers}")
    if rhs.dtype != jnp.float32:
        raise ValueError(f"int8 products take weights in float32, whose values are on the grid; not {rhs.dtype}")
    return _multiply(lhs, rhs, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
    (q, scales), (wq, w_scales) = quantize_tokens(x, contracted), recover_integers(w, contracted)
    tokens = x.shape[: x.ndim - contracted]
    outputs = w.shape[contracted:]
    scales = scales.reshape(*tokens, *(1,) * len(outputs))
    return scaled_product(q, scales, wq, w_scales.reshape(outputs), _contract(x, contracted)).astype(x.dtype)


def _contract(x: jax.Array, contracted: int) -> jax.lax.DotDimensionNumbers:
    return (tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))), ((), ())


def _multiply_forward(x: jax.Array, w: jax.Array, contracted: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply(x, w, contracted), (x, w)


def _multiply_backward(
    contracted: int, saved: tuple[jax.Array, jax.Array], d_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    # Rounded again rather than saved: the inputs are saved anyway.
    product = functools.partial(jax.lax.dot_general, dimension_numbers=_contract(x, contracted))
    d_x, d_w = jax.vjp(product, round_tokens(x, contracted), w.astype(x.dtype))[1](d_y)
    return d_x, d_w.astype(w.dtype)


_multiply.defvjp(_multiply_forward, _multiply_backward)
