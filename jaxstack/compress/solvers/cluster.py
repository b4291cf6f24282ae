"""Weight clustering by differentiable k-means: each matrix ends with 2^bits different values.

A step replaces each weight by a mean of the centroids, weighted by a softmax over its squared distances (DKM, Cho et
al. 2022, arXiv:2108.12659). The map of weights to centroids would take 2^bits values for each weight and iteration.
As 16-bit weights have at most 65,536 different values, the iterations run on a table of them with their counts (eDKM,
Cho et al. 2023, arXiv:2309.00964), and the backward pass, which repeats them, only needs the 16-bit weights.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxstack.compress.base import DuringTraining, Format, Stored, training_feature
from jaxstack.compress.formats.lookup_table import ValueTable, quantiles
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.config.features import Feature
from pallas_kernels.weight_only.packed import PackedWeight, pack_lookup

_TABLE = ValueTable(smallest=2.0**-40, largest=2.0**13)
"""The values of weights, a fifth of all bfloat16 values. Smaller ones are as good as 0; squares of larger ones may
overflow, and no weight has them."""


@dataclasses.dataclass(frozen=True)
class Clustering(Format):
    """Indices into a table of 2^bits bfloat16 values for each matrix, found by differentiable k-means.

    Attributes:
      bits: bits of an index.
      temperature: temperature of the softmax, as a multiple of the mean square of the matrix.
      iterations: iterations of k-means.
    """

    bits: int
    temperature: float
    iterations: int

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        indices, table = assign(w, self)
        return pack_lookup(self.bits, indices, table[None])

    def round(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        return hard_clusters(w, self)

    def round_in_training(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        return soft_clusters(w, self)


class ClusterRule(DuringTraining):
    """Clusters the weights of each matrix around 2^bits values, stored once, with an index for each weight."""

    one_by_one: ClassVar[bool] = True
    features: ClassVar[tuple[Feature, ...]] = (training_feature("clustered weights", "cluster"),)

    method: Literal["cluster"] = "cluster"
    bits: int = Field(default=3, ge=1, le=8)
    """Bits of an index: each matrix has 2^bits different values."""
    temperature: float = Field(default=0.02, gt=0)
    """Temperature of the softmax over squared distances, as a multiple of the mean square of the matrix."""
    iterations: int = Field(default=4, ge=1)
    """Iterations of k-means in each step, from the quantiles of the weights."""

    @property
    def format(self) -> Clustering:
        return Clustering(self.bits, self.temperature, self.iterations)

    @property
    def title(self) -> str:
        return f"clustered around {2**self.bits} values a matrix"

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the clustered weight, so that compression after training starts from the clusters already found."""
        return self.export(stored, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def soft_clusters(w: Float[Array, "out in"], settings: Clustering) -> Float[Array, "out in"]:
    """Return each weight replaced by a softmax-weighted mean of k-means centroids; differentiable, float32.

    Weights are rounded to bfloat16 first.

    The initial centroids and the temperature's scale are constants in the gradient.
    """
    places, values, counts = _tabulate(w)
    return _means(values, values, counts, settings)[places]


def _forward(w: jax.Array, settings: Clustering) -> tuple[jax.Array, jax.Array]:
    return soft_clusters(w, settings), w.astype(jnp.bfloat16)


def _backward(settings: Clustering, rounded: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    places, values, counts = _tabulate(rounded)
    totals = jnp.zeros_like(values).at[places].add(gradient)
    # A weight changes its own mean directly, and all means through the centroids. The first part is elementwise in the
    # table of values; the second is the same for all weights of one value.
    _, own = jax.jvp(lambda x: _means(x, values, counts, settings), (values,), (jnp.ones_like(values),))
    (shared,) = jax.vjp(lambda data: _means(values, data, counts, settings), values)[1](totals)
    shared = shared / jnp.maximum(counts, 1.0)
    return (gradient * own[places] + shared[places],)


soft_clusters.defvjp(_forward, _backward)


def hard_clusters(w: Float[Array, "out in"], settings: Clustering) -> Float[Array, "out in"]:
    """Replace each weight by the nearest k-means centroid, a bfloat16 value in float32."""
    indices, table = assign(w, settings)
    return table.astype(jnp.float32)[indices]


def assign(w: Float[Array, "out in"], settings: Clustering) -> tuple[Int[Array, "out in"], Float[Array, " k"]]:
    """Cluster a matrix by k-means; return the index of each weight's nearest centroid, and the bfloat16 centroids."""
    places, values, counts = _tabulate(w)
    centroids, _ = _iterate(values, counts, settings)
    table = centroids.astype(jnp.bfloat16)
    nearest = jnp.argmin(jnp.abs(values[:, None] - table.astype(jnp.float32)), axis=-1)
    return nearest.astype(jnp.int32)[places], table


def stored_bytes(weights: int, matrices: int, bits: int) -> int:
    """Return how many bytes clustered matrices take on disk: packed indices, and a bfloat16 table for each matrix."""
    return -(-weights * bits // 8) + matrices * 2**bits * 2


def count_values(w: Float[Array, "out in"]) -> Float[Array, " table"]:
    """Count how many weights of a matrix have each bfloat16 value in the table that k-means runs on, float32."""
    return _tabulate(w)[2]


def _tabulate(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Look up a matrix in the table of bfloat16 values; return indices of weights, the values and their counts."""
    places = _TABLE.places(w)
    return places, jnp.asarray(_TABLE.values), _TABLE.counts(places)


def start_centroids(counts: jax.Array, settings: Clustering) -> tuple[jax.Array, jax.Array]:
    """Return k-means' initial centroids (weight quantiles), and the temperature times the weights' mean square."""
    k = 2**settings.bits
    centroids = quantiles(_TABLE.values, counts, (jnp.arange(k) + 0.5) / k)
    mean_square = jnp.sum(counts / jnp.sum(counts) * jnp.square(_TABLE.values))
    return centroids, jnp.maximum(settings.temperature * mean_square, jnp.finfo(jnp.float32).tiny)


def _iterate(data: jax.Array, counts: jax.Array, settings: Clustering) -> tuple[jax.Array, jax.Array]:
    """Run k-means on weighted values; return the final centroids and those before the last iteration, [k]."""
    centroids, temperature = jax.lax.stop_gradient(start_centroids(counts, settings))
    before = centroids
    for _ in range(settings.iterations):
        shares = jax.nn.softmax(-jnp.square(data[:, None] - centroids) / temperature, axis=-1) * counts[:, None]
        total = jnp.sum(shares, axis=0)
        moved = jnp.sum(shares * data[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
        before = centroids
        centroids = jnp.where(total > 0, moved, centroids)
    return centroids, before


def _means(x: jax.Array, data: jax.Array, counts: jax.Array, settings: Clustering) -> jax.Array:
    """Return for each x the softmax-weighted mean of the k-means centroids of the values `data`."""
    centroids, before = _iterate(data, counts, settings)
    _, temperature = start_centroids(counts, settings)
    shares = jax.nn.softmax(-jnp.square(x[:, None] - before) / temperature, axis=-1)
    return jnp.sum(shares * centroids, axis=-1)
