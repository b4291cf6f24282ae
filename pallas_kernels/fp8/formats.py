"""The two FP8 formats, and how an array gets into them: a scale that is a power of two, and a saturating cast.

Scales are powers of two: of a floating-point format that costs nothing but the ends of its range, and the value that
the FP8 numbers stand for is then exact in bfloat16 (so is what the plain form computes with).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.target import current_target

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
GRADIENT_FORMATS = {"e5m2": E5M2, "e4m3": E4M3}
_LARGEST_SCALE = 2.0**100


class Quantized(NamedTuple):
    """values * inverse_scale is what it stands for; `inverse_scale` float32, [] or one an element of some grid."""

    values: jax.Array
    inverse_scale: jax.Array


def largest(dtype: jax.typing.DTypeLike) -> float:
    """The largest finite number of the format."""
    return float(jnp.finfo(dtype).max)


def power_of_two_scale(amax: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The largest power of two that takes `amax` to at most the format's largest number, float32; 1 for amax 0."""
    ratio = jnp.minimum(largest(dtype) / amax.astype(jnp.float32), _LARGEST_SCALE)
    bits = lax.bitcast_convert_type(ratio, jnp.int32) & 0x7F800000
    return jnp.where(amax > 0, lax.bitcast_convert_type(bits, jnp.float32), 1.0)


def saturating_cast(x: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x * scale in the format, clipped to its range (nan stays nan)."""
    # In the dtype of x, where the product is as exact: of a float32 one XLA may name_for_checkpoint a float32 copy of x.
    limit = jnp.asarray(largest(dtype), x.dtype)
    return jnp.clip(x * scale.astype(x.dtype), -limit, limit).astype(dtype)


def absolute_maximum(x: jax.Array) -> jax.Array:
    """max |x| [] in float32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike, amax: jax.Array | None = None) -> Quantized:
    """x in the format with one scale for all of it, from `amax` (default: of x itself)."""
    scale = power_of_two_scale(absolute_maximum(x) if amax is None else amax, dtype)
    return Quantized(saturating_cast(x, scale, dtype), 1.0 / scale)


def name_for_checkpoint(x: Quantized) -> Quantized:
    """x, named for `jax.checkpoint`'s policies: saved as it is, and not what it was rounded from; see `as_bytes`."""
    return Quantized(*(checkpoint_name(array, "fp8_input") for array in as_bytes(x)))


def as_bytes(tree: Any) -> Any:
    """On a CPU E4M3 arrays as bytes, in which a backward pass keeps them; see `from_bytes`.

    What it keeps `jax.checkpoint` rounds once more, to its format. On a CPU XLA computes 8-bit floats in wider ones,
    and rounds there as if E4M3 had infinities: numbers over 240 would become nan.
    """
    if current_target().platform != "cpu":
        return tree
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == E4M3 else x, tree)


def from_bytes(tree: Any) -> Any:
    """What `as_bytes` was given."""
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, E4M3) if x.dtype == jnp.uint8 else x, tree)


def dequantize(x: Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What a per-tensor scaled array stands for; exact in bfloat16 and float32.

    In this form, in front of a product, XLA recognises an FP8 matmul.
    """
    return x.values.astype(dtype) * x.inverse_scale.astype(dtype)
