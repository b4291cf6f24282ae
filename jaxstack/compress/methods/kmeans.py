"""Palettization: each weight becomes an index into a small table, which k-means fits to the matrix."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from jaxstack.compressed_training.bfloat16_table import bfloat16_patterns, count_patterns, pattern_values, quantiles
from pallas_kernels.weight_only.packed import pack_lookup


class KMeans(Method):
    """Clusters the weights of a matrix by k-means (Lloyd 1982). Needs no calibration text.

    As in eDKM (Cho et al. 2023, arXiv:2309.00964), weights are rounded to bfloat16 first, of which there are 65,536 at
    most: an iteration reads that many values, each weighted by its count, whatever the size of the matrix.
    """

    method: Literal["kmeans"] = "kmeans"
    bits: int = Field(default=3, ge=1, le=8)
    """Bits of an index: the table has 2^bits values."""
    iterations: int = Field(default=100, ge=1)
    """Iterations of k-means."""

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        patterns = bfloat16_patterns(w)
        codebook = find_cluster_centers(count_patterns(patterns), self.bits, self.iterations)
        return pack_lookup(self.bits, _nearest(jnp.asarray(pattern_values()), codebook)[patterns], codebook[None])


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
        cluster = _nearest(values, centers)
        weight = jnp.zeros(entries).at[cluster].add(counts)
        total = jnp.zeros(entries).at[cluster].add(counts * values)
        return jnp.sort(jnp.where(weight > 0, total / jnp.maximum(weight, 1), centers))

    def error(centers: jax.Array) -> jax.Array:
        squares = jnp.square(centers[_nearest(values, centers)] - values)  # overflows for the largest, absent ones
        return jnp.sum(jnp.where(counts > 0, counts * squares, 0.0))

    # All distinct weights if there are at most `entries`, otherwise the smallest ones.
    present = jnp.nonzero(counts[order] > 0, size=entries, fill_value=0)[0]
    distinct = jnp.sort(values[order][present])
    starts = (low + (high - low) * middles, quantiles(table, counts, middles), distinct)
    found = jnp.stack([jax.lax.fori_loop(0, iterations, step, start) for start in starts])
    return found[jnp.argmin(jax.vmap(error)(found))]


def _nearest(values: Float[Array, " n"], centers: Float[Array, " entries"]) -> Int[Array, " n"]:
    """Return for each value the index of its nearest center; the centers are ascending."""
    return jnp.searchsorted((centers[1:] + centers[:-1]) / 2, values)
