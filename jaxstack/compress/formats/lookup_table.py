"""Lookup table: each weight becomes an index into a small table of values, which k-means fits to the matrix.

k-means runs on the bfloat16 values of the weights, each weighted by how often it occurs, so that its cost does not grow
with the size of the matrix (eDKM, Cho et al. 2023, arXiv:2309.00964). A pattern is the 16 bits of a value as integer.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxstack.compress.base import AfterTraining, Format
from pallas_kernels.weight_only.packed import PackedWeight, pack_lookup

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
        low, high = self._ends
        patterns = bfloat16_patterns(w)
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


@dataclasses.dataclass(frozen=True)
class LookupTable(Format):
    """Indices into a table of 2^bits values for each matrix, found by k-means (Lloyd 1982).

    Attributes:
      bits: bits of an index.
      iterations: iterations of k-means.
    """

    bits: int
    iterations: int

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        patterns = bfloat16_patterns(w)
        codebook = find_cluster_centers(count_patterns(patterns), self.bits, self.iterations)
        return pack_lookup(
            self.bits, nearest_centers(jnp.asarray(pattern_values()), codebook)[patterns], codebook[None]
        )


class KMeans(AfterTraining):
    """Clusters the weights of a matrix by k-means (Lloyd 1982). Needs no calibration text.

    As in eDKM (Cho et al. 2023, arXiv:2309.00964), weights are rounded to bfloat16 first, of which there are 65,536 at
    most: an iteration reads that many values, each weighted by its count, whatever the size of the matrix.
    """

    method: Literal["kmeans"] = "kmeans"
    bits: int = Field(default=3, ge=1, le=8)
    """Bits of an index: the table has 2^bits values."""
    iterations: int = Field(default=100, ge=1)
    """Iterations of k-means."""

    @property
    def format(self) -> LookupTable:
        return LookupTable(self.bits, self.iterations)


@functools.partial(jax.jit, static_argnames=("bits", "iterations"))
def find_cluster_centers(counts: Float[Array, "65536"], bits: int, iterations: int) -> Float[Array, " entries"]:
    """Find the 2^bits k-means centers of a matrix, ascending, from a histogram of its bfloat16 values.

    k-means runs from three starts: equal steps between the smallest and the largest weight, which suits long tails;
    quantiles; and the distinct weights themselves, which suits weights of few values. The result with the least
    squared error is returned. A cluster without weights keeps its center.
    """
    table = pattern_values()
    entries = 2**bits
    values = jnp.asarray(table)
    order = np.argsort(table, kind="stable")
    middles = (jnp.arange(entries, dtype=jnp.float32) + 0.5) / entries
    low = jnp.min(values, where=counts > 0, initial=jnp.inf)
    high = jnp.max(values, where=counts > 0, initial=-jnp.inf)

    def step(_: int, centers: jax.Array) -> jax.Array:
        cluster = nearest_centers(values, centers)
        weight = jnp.zeros(entries).at[cluster].add(counts)
        total = jnp.zeros(entries).at[cluster].add(counts * values)
        return jnp.sort(jnp.where(weight > 0, total / jnp.maximum(weight, 1), centers))

    def error(centers: jax.Array) -> jax.Array:
        squares = jnp.square(
            centers[nearest_centers(values, centers)] - values
        )  # overflows for the largest, absent ones
        return jnp.sum(jnp.where(counts > 0, counts * squares, 0.0))

    # All distinct weights if there are at most `entries`, otherwise the smallest ones.
    present = jnp.nonzero(counts[order] > 0, size=entries, fill_value=0)[0]
    distinct = jnp.sort(values[order][present])
    starts = (low + (high - low) * middles, quantiles(table, counts, middles), distinct)
    found = jnp.stack([jax.lax.fori_loop(0, iterations, step, start) for start in starts])
    return found[jnp.argmin(jax.vmap(error)(found))]


def nearest_centers(values: Float[Array, "*dims"], centers: Float[Array, " entries"]) -> Int[Array, "*dims"]:
    """Return the index of the nearest center of each value, the lower one of a tie; the centers are ascending."""
    return jnp.searchsorted((centers[1:] + centers[:-1]) / 2, values)
