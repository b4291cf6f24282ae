"""Bipolar integers (odd, symmetric about 0) of 1 to 8 bits, and their exact matmuls by int8 dots.

A bipolar integer of n bits is the sum of (2 b_i - 1) 2^i over its bits b_i: an odd number from -(2^n - 1) to 2^n - 1,
so that one bit means +1 or -1. The format is that of arbitrary-precision kernels for language models (Ma et al. 2024,
arXiv:2409.17870), whose tensor cores multiply one pair of bit planes at a time. Here the sum u of b_i 2^i gives
x = 2 u - (2^n - 1), which int8 holds for up to 7 bits. A value of 8 bits is two values of 4 bits, x = 16 high + low.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

MOST_BITS = 8
"""Largest number of bits of a bipolar integer."""
_WIDEST_IN_INT8 = 7
_LARGEST_SUM = 2**31 - 1


def encode_bipolar(x: Float[Array, "..."], bits: int) -> UInt8[Array, "..."]:
    """Quantize x to bipolar integers, odd from -(2^bits - 1) to 2^bits - 1, stored as u = (x + 2^bits - 1) / 2.

    Args:
      x: values in units of the format, from -(2^bits - 1) to 2^bits - 1; values outside are clipped.
      bits: bits of an integer, 1 to 8.
    """
    _check_bits(bits)
    return jnp.clip(jnp.round((x.astype(jnp.float32) + (2**bits - 1)) / 2), 0, 2**bits - 1).astype(jnp.uint8)


def decode_bipolar(u: UInt8[Array, "..."], bits: int) -> Int[Array, "..."]:
    """Decode bipolar integers, stored as unsigned u, to their values 2 u - (2^bits - 1), int32."""
    _check_bits(bits)
    return 2 * u.astype(jnp.int32) - (2**bits - 1)


def bipolar_matmul(x: UInt8[Array, "M K"], x_bits: int, w: UInt8[Array, "K N"], w_bits: int) -> Int[Array, "M N"]:
    """Return the exact product of two matrices of bipolar integers, int32.

    Args:
      x, w: the bits of their values, from `encode_bipolar`.
      x_bits, w_bits: bits of a value, 1 to 8.

    Raises:
      ValueError: a number of bits is not from 1 to 8, or K is so large that int32 cannot hold every sum.
    """
    _check_bits(x_bits)
    _check_bits(w_bits)
    most = _LARGEST_SUM // ((2**x_bits - 1) * (2**w_bits - 1))
    if x.shape[1] > most:
        raise ValueError(
            f"sums of {x.shape[1]} products of {x_bits} by {w_bits} bits exceed int32; split them into at most {most}."
        )
    total = jnp.zeros((x.shape[0], w.shape[1]), jnp.int32)
    for x_plane, x_weight in _planes(x, x_bits):
        for w_plane, w_weight in _planes(w, w_bits):
            total += x_weight * w_weight * jnp.matmul(x_plane, w_plane, preferred_element_type=jnp.int32)
    return total


def _planes(u: UInt8[Array, "..."], bits: int) -> list[tuple[Int[Array, "..."], int]]:
    """Split bipolar integers into pairs (int8 array, factor) whose products add up to the integers' values."""
    if bits <= _WIDEST_IN_INT8:
        return [(decode_bipolar(u, bits).astype(jnp.int8), 1)]
    half = bits // 2
    high = u >> half
    low = u & (2**half - 1)
    return [(decode_bipolar(high, half).astype(jnp.int8), 2**half), (decode_bipolar(low, half).astype(jnp.int8), 1)]


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bipolar integers have 1 to {MOST_BITS} bits, not {bits}.")
