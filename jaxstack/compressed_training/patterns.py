"""Table of the 65,536 bfloat16 values, in which k-means over weights is independent of the size of a matrix.

Weights are rounded to bfloat16, and each value counts as often as it occurs (eDKM, Cho et al. 2023, arXiv:2309.00964).
A pattern is the 16 bits of a value as an integer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

PATTERNS = 2**16
"""Number of values."""


def pattern_values(largest: float = np.inf) -> Float[np.ndarray, "65536"]:
    """Return the value of each 16-bit bfloat16 pattern, float32; 0 for NaN and for magnitudes of at least `largest`."""
    values = (np.arange(PATTERNS, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(np.abs(values) < largest, values, np.float32(0))


def patterns_of(w: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Return the pattern of each weight, rounded to bfloat16, as int32."""
    return jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)


def count_patterns(patterns: Int[Array, "*dims"]) -> Float[Array, "65536"]:
    """Return how often each pattern occurs, float32."""
    # Counted in integers: a float32 sum of ones ends at 2^24.
    return jnp.bincount(patterns.ravel(), length=PATTERNS).astype(jnp.float32)


def quantiles(
    values: Float[np.ndarray, "65536"], counts: Float[Array, "65536"], shares: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Return for each share the smallest value that at least this share of all weights does not exceed."""
    order = np.argsort(values, kind="stable")
    cumulative = jnp.cumsum(counts[order])
    return jnp.asarray(values[order])[jnp.searchsorted(cumulative, shares * cumulative[-1])]
