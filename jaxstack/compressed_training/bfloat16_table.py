"""Counts weights by their bfloat16 value, so that the cost of k-means does not grow with the size of a matrix.

Weights are rounded to bfloat16, and each value counts as often as it occurs (eDKM, Cho et al. 2023, arXiv:2309.00964).
A pattern is the 16 bits of a value as an integer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

PATTERNS = 2**16
"""Number of values."""


def pattern_values(largest: float = np.inf) -> Float[np.ndarray, "65536"]:
    """Return the float32 value of each bfloat16 bit pattern; 0 for NaN and magnitudes of at least `largest`."""
    values = (np.arange(PATTERNS, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(np.abs(values) < largest, values, np.float32(0))


def bfloat16_patterns(w: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Return the 16 bits of each weight after rounding to bfloat16, as int32."""
    return jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)


def count_patterns(patterns: Int[Array, "*dims"]) -> Float[Array, "65536"]:
    """Return how often each of the 65,536 bfloat16 bit patterns occurs, float32."""
    # Counted in integers: a float32 sum of ones ends at 2^24.
    return jnp.bincount(patterns.ravel(), length=PATTERNS).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ValueTable:
    """Table of the bfloat16 values with magnitudes from `smallest` to below `largest`; all others count as 0.

    Attributes:
      smallest, largest: powers of two.
    """

    smallest: float
    largest: float

    @property
    def _ends(self) -> tuple[int, int]:
        low, high = np.asarray([self.smallest, self.largest], np.float32).view(np.uint32) >> 16
        return int(low), int(high)

    @functools.cached_property
    def values(self) -> Float[np.ndarray, " table"]:
        """The values of the table: 0, the positive ones and the negative ones, float32."""
        positive = pattern_values()[slice(*self._ends)]
        return np.concatenate([np.zeros(1, np.float32), positive, -positive])

    def places(self, w: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
        """Round weights to bfloat16 and return their indices in the table's `values`, as int32."""
        (low, high), patterns = self._ends, bfloat16_patterns(w)
        magnitudes = patterns & (PATTERNS // 2 - 1)
        place = magnitudes - low + 1 + jnp.where(patterns >= PATTERNS // 2, high - low, 0)
        return jnp.where((magnitudes >= low) & (magnitudes < high), place, 0)

    def counts(self, places: Int[Array, "*dims"]) -> Float[Array, " table"]:
        """Count how many weights have each value of the table, float32, given their indices from `places`."""
        return jnp.bincount(places.ravel(), length=len(self.values)).astype(jnp.float32)


def quantiles(
    values: Float[np.ndarray, " table"], counts: Float[Array, " table"], shares: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Return quantiles, at the fractions `shares` (0 to 1), of weights given as distinct values and their counts."""
    order = np.argsort(values, kind="stable")
    cumulative = jnp.cumsum(counts[order])
    return jnp.asarray(values[order])[jnp.searchsorted(cumulative, shares * cumulative[-1])]
