"""Block floating point: integers of few bits with one power of two for each block of values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.weight_only.formats import powers_of_two

_LEAST = -100
"""Smallest exponent of a step, below which values are rounded to zero: far from float32's subnormal numbers."""


def block_exponents(largest: Float[Array, "*blocks"], bits: int) -> Int[Array, "*blocks"]:
    """Return each block's exponent e, int8: divided by 2^e, the block's largest magnitude needs exactly `bits` bits.

    With e = floor(log2(largest)) the step is 2^(e - bits + 2).
    """
    exponent = (jax.lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32) >> 23) - 127
    return jnp.clip(exponent - (bits - 2), _LEAST, 127).astype(jnp.int8)


def round_to_steps(x: Float[Array, "..."], exponents: Int[Array, "..."], bits: int) -> Int[Array, "..."]:
    """Return x / 2^exponent rounded to the nearest integer and clipped to signed integers of `bits` bits, as int8."""
    limit = 2 ** (bits - 1)
    scaled = x.astype(jnp.float32) * powers_of_two(-exponents.astype(jnp.int32))
    return jnp.clip(jnp.round(scaled), -limit, limit - 1).astype(jnp.int8)
