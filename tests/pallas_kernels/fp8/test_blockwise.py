"""Blockwise FP8: the error of weight gradients with coarser scales of the input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import blockwise
from pallas_kernels.fp8.sources import IDENTITY

pytestmark = pytest.mark.longer  # a few seconds each


@pytest.mark.longer
def test_a_coarser_scale_of_the_input_hardly_changes_the_error_of_weight_gradients():
    """One scale per 128 x 128 values instead of one per 128.

    FP8 values keep their precision over 15 powers of two, so also beside channels that are 300 times as large, except
    for the smallest values.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (1024, 256)) * jnp.exp(jax.random.normal(keys[1], (1, 256)) / 2)
    x *= jnp.where(jax.random.uniform(keys[2], (1, 256)) < 0.02, 300, 1)
    gradient = jax.random.normal(keys[3], (1024, 128)) * jnp.exp(2 * jax.random.normal(keys[4], (1024, 1)))
    quantized = blockwise.quantize_rows(gradient.T)
    errors = []
    for shared in (False, True):
        ((_, transposed),) = blockwise.quantize_both(IDENTITY, [x], shared)
        found = blockwise.multiply_dequantized([(transposed, quantized)], jnp.float32)
        wanted = jnp.dot(x.T, gradient, precision="highest")
        # Of each channel of x by itself, as large ones would hide the others.
        errors.append(jnp.linalg.norm(found - wanted, axis=1) / jnp.linalg.norm(wanted, axis=1))
    fine, coarse = errors
    assert 0.03 < jnp.median(fine) < 0.04
    np.testing.assert_allclose(coarse, fine, rtol=0.5)
    assert abs(jnp.mean(coarse) / jnp.mean(fine) - 1) < 0.02
