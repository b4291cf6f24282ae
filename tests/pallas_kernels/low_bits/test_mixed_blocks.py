"""Activations in mixed blocks: exact integer products, and the error with and without the permutation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_bits.mixed_blocks import (
    BLOCK,
    count_wide_blocks,
    dequantize_activations,
    mixed_matmul,
    outlier_order,
    quantize_activations,
    quantize_weights,
)
from pallas_kernels.weight_only.rounding_grid import Grid


@pytest.fixture(scope="module")
def layer():
    """Inputs of 512 channels, 12 of them outliers in every one of the 4 blocks, and weights [64, 512]."""
    random = np.random.default_rng(0)
    deviation = np.exp(random.normal(size=512) * 0.3)
    deviation[random.choice(512, 12, replace=False)] *= 40
    x = random.normal(size=(96, 512)) * deviation
    w = random.normal(size=(64, 512)) / deviation.clip(1)
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def relative_error(found, wanted) -> float:
    return float(jnp.square(found - wanted).sum() / jnp.square(wanted).sum())


@pytest.mark.longer
def test_the_integer_product_is_that_of_the_rounded_values(layer):
    x, w = layer
    order = outlier_order(jnp.abs(x).mean(0))
    rounded, (q, scales) = quantize_activations(x, order, 1), quantize_weights(w, order)
    wanted = (
        np.asarray(dequantize_activations(rounded), np.float64) @ np.asarray(Grid(4, BLOCK).dequantize(q, scales)).T
    )
    np.testing.assert_allclose(mixed_matmul(rounded, q, scales), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert rounded.q.dtype == jnp.int8 and jnp.abs(rounded.q[:, BLOCK:]).max() <= 8
    assert rounded.bits == 5


@pytest.mark.longer
def test_outliers_in_one_8_bit_block_lower_the_error(layer):
    x, w = layer
    magnitudes = jnp.abs(x).mean(0)
    assert count_wide_blocks(magnitudes) == 1
    exact = x @ w.T
    identity = jnp.arange(512)
    order = outlier_order(magnitudes)

    def error(order, wide):
        return relative_error(mixed_matmul(quantize_activations(x, order, wide), *quantize_weights(w, order)), exact)

    plain = error(identity, 0)
    unpermuted = error(identity, 1)
    mixed = error(order, 1)
    assert mixed < 0.25 * unpermuted < plain
    weights_alone = relative_error(x @ Grid(4, BLOCK).round(w[:, order])[:, jnp.argsort(order)].T, exact)
    assert mixed < 3 * weights_alone


def test_channels_that_fill_no_blocks_are_refused():
    with pytest.raises(ValueError, match="pad the channels"):
        quantize_activations(jnp.ones((2, 200)), jnp.arange(200), 0)
    with pytest.raises(ValueError, match="3 of them wide"):
        quantize_activations(jnp.ones((2, 256)), jnp.arange(256), 3)
    assert jax.tree.leaves(quantize_activations(jnp.ones((2, 256)), jnp.arange(256), 2))[0].shape == (2, 256)
