"""k-means over the table of bfloat16 values: exact clusters, and the best quantizer of a normal distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.vq import kmeans2

from jaxstack.compress.config import load_recipe
from jaxstack.compress.formats.lookup_table import KMeans, bfloat16_patterns, count_patterns, find_cluster_centers


@pytest.mark.longer
def test_weights_of_eight_values_are_kept():
    values = jnp.array([-4.0, -2.0, -1.0, -0.25, 0.5, 1.5, 2.5, 3.5])
    w = jax.random.choice(jax.random.key(0), values, (16, 32))
    packed = KMeans(path=".*").compress(w, None)
    np.testing.assert_array_equal(packed.matrix(), w)
    assert packed.stored_bytes == 16 * 32 * 3 // 8 + 8 * 4


@pytest.mark.longer
def test_three_bits_reach_the_least_error_of_a_normal_distribution():
    """Lloyd-Max: 8 levels leave 0.03454 of the variance (Max 1960), at 0.2451, 0.7560, 1.344 and 2.152 deviations."""
    w = jax.random.normal(jax.random.key(0), (512, 512))
    packed = KMeans(path=".*").compress(w, None)
    assert abs(float(jnp.square(packed.matrix() - w).mean()) - 0.03454) < 5e-4
    levels = np.sort(np.abs(packed.arrays["codebook"][0]))[1::2]
    np.testing.assert_allclose(levels, [0.2451, 0.756, 1.344, 2.152], atol=0.04)


@pytest.mark.longer
def test_the_table_gives_the_clusters_of_k_means_over_all_weights():
    w = np.asarray(jax.random.normal(jax.random.key(1), (64, 64)).astype(jnp.bfloat16), np.float32)
    centers = find_cluster_centers(count_patterns(bfloat16_patterns(jnp.asarray(w))), 2, 50)
    start = w.min() + (w.max() - w.min()) * (np.arange(4) + 0.5) / 4
    wanted, _ = kmeans2(w.reshape(-1, 1), start[:, None], iter=50, minit="matrix")
    errors = [np.square(w[..., None] - c.reshape(-1)).min(-1).sum() for c in (np.asarray(centers), wanted)]
    assert errors[0] < errors[1] * 1.0001


def test_the_recipe_reads():
    recipe = load_recipe("cluster3")
    assert isinstance(recipe.layers[0], KMeans) and recipe.layers[0].bits == 3
