"""The FP8 formats E4M3 and E5M2, and quantization to them with power-of-two scales and saturating casts.

A power of two as scale costs a floating-point format nothing but the ends of its range, and the dequantized value is
exact in bfloat16.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.target import current_target

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
GRADIENT_FORMATS = {"e5m2": E5M2, "e4m3": E4M3}
_LARGEST_SCALE = 2.0**100


Tree = TypeVar("Tree")


class Quantized(NamedTuple):
    """A quantized array: FP8 `values` and `inverse_scale`, whose product approximates the original.

    `inverse_scale` is float32, [] or one value per element of some grid.
    """

    values: jax.Array
    inverse_scale: jax.Array


def largest(dtype: jax.typing.DTypeLike) -> float:
    """Return the largest finite number of an FP8 format."""
    return float(jnp.finfo(dtype).max)


def power_of_two_scale(amax: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the largest power-of-two scale, in float32, that keeps `amax` in the format's range; 1 if amax is 0."""
    ratio = jnp.minimum(largest(dtype) / amax.astype(jnp.float32), _LARGEST_SCALE)
    bits = lax.bitcast_convert_type(ratio, jnp.int32) & 0x7F800000
    return jnp.where(amax > 0, lax.bitcast_convert_type(bits, jnp.float32), 1.0)


def saturating_cast(x: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Cast x * scale to an FP8 format, clipped to the format's range (nan stays nan)."""
    # In the dtype of x, in which the product is exact too: with float32 XLA may store a float32 copy of x.
    limit = jnp.asarray(largest(dtype), x.dtype)
    return jnp.clip(x * scale.astype(x.dtype), -limit, limit).astype(dtype)


def absolute_maximum(x: jax.Array) -> jax.Array:
    """Return max |x| as a float32 scalar."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike, amax: jax.Array | None = None) -> Quantized:
    """Quantize x to an FP8 format with one scale for the whole array, set by `amax` (default: max |x|)."""
    scale = power_of_two_scale(absolute_maximum(x) if amax is None else amax, dtype)
    return Quantized(saturating_cast(x, scale, dtype), 1.0 / scale)


def name_for_remat(x: Quantized) -> Quantized:
    """Name a quantized x "fp8_input", so that `jax.checkpoint` policies can save it instead of the unquantized x.

    On a CPU the arrays are bytes (see `as_bytes`).
    """
    return Quantized(*(checkpoint_name(array, "fp8_input") for array in as_bytes(x)))


def as_bytes(tree: Tree) -> Tree:
    """Bitcast E4M3 arrays to uint8 on a CPU target, where saving them for the backward pass would lose values.

    `jax.checkpoint` rounds what it saves to its format once more. On a CPU XLA computes 8-bit floats in wider formats,
    and rounds as if E4M3 had infinities: numbers above 240 would become nan.
    """
    if current_target().platform != "cpu":
        return tree
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == E4M3 else x, tree)


def from_bytes(tree: Tree) -> Tree:
    """Undo `as_bytes`: bitcast the uint8 arrays of a tree to E4M3."""
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, E4M3) if x.dtype == jnp.uint8 else x, tree)


def dequantize(x: Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantize an FP8 array with one power-of-two scale to `dtype`; exact in bfloat16 and float32.

    XLA recognises an FP8 matmul by this form in front of a matmul.
    """
    return x.values.astype(dtype) * x.inverse_scale.astype(dtype)
