"""Norms against their formulas, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.models.norm import LayerNorm, RMSNorm


def layer_norm(x, scale, bias):
    deviation = x - jnp.mean(x, -1, keepdims=True)
    return deviation / jnp.sqrt(jnp.mean(deviation**2, -1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    scale = 1 + 0.3 * jax.random.normal(keys[0], (48,))
    bias = jax.random.normal(keys[1], (48,))
    return (3 * jax.random.normal(keys[2], (2, 5, 48)) + 1).astype(dtype), scale, bias


def with_parameters(norm, scale, bias=None):
    norm.scale.set_value(scale)
    if bias is not None:
        norm.bias.set_value(bias)
    return norm


@pytest.mark.longer
def test_layer_norm_and_its_gradients_are_those_of_the_formula():
    weights = jnp.cos(jnp.arange(48.0))

    def ours(x, scale, bias):
        return jnp.sum(with_parameters(LayerNorm(48, 1e-5), scale, bias)(x) * weights)

    def plain(*xs):
        return jnp.sum(layer_norm(*xs) * weights)

    for got, wanted in zip(
        jax.value_and_grad(ours, (0, 1, 2))(*arrays())[1], jax.grad(plain, (0, 1, 2))(*arrays()), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_norms_round_once(dtype):
    x, scale, bias = arrays(dtype)
    wide = x.astype(jnp.float32)
    for got, wanted in (
        (with_parameters(LayerNorm(48, 1e-5), scale, bias)(x), layer_norm(wide, scale, bias)),
        (with_parameters(RMSNorm(48, 1e-5), scale)(x), rms_norm(wide, scale)),
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=jnp.finfo(dtype).eps, atol=1e-3)
