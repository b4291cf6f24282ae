"""FAVOR+: an unbiased estimate of softmax attention, whose error falls with more features and which stays causal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention, performer_attention, random_projection
from pallas_kernels.linear_time_attention.favor import Favor
from tests.compilation import run_jitted

B = 1
T = 48
N = 2
H = 16


def arrays(seed=0, scale=0.5):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (B, T, N, H)) * scale for key in keys]


def kernel_estimates(features, seeds, orthogonal):
    """exp(q . k / sqrt(H)) estimated with each seed's projection: [seeds, T, T]."""
    q, k, _ = arrays()

    @jax.jit
    def estimate(projection):
        favor = Favor(projection, H**-0.5)
        query = favor.query(q)
        key = favor.key(k)
        weight = jnp.exp(query.log_weight[0, :, None, 0] + key.log_weight[0, None, :, 0])
        return jnp.einsum("tf,sf->ts", query.values[0, :, 0], key.values[0, :, 0]) * weight / features

    return np.stack(
        [estimate(random_projection(features, H, seed=seed, orthogonal=orthogonal)) for seed in range(seeds)]
    )


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_kernel_is_estimated_without_bias(orthogonal):
    q, k, _ = (np.asarray(x[0, :, 0], np.float64) for x in arrays())
    truth = np.exp(q @ k.T / np.sqrt(H))
    estimates = kernel_estimates(128, 200, orthogonal)
    spread = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert np.abs(estimates.mean(axis=0) - truth).mean() < 1.2 * spread.mean()
    assert spread.mean() < 0.1 * truth.mean()


def test_orthogonal_directions_lower_the_variance():
    assert kernel_estimates(16, 100, True).var() < 0.95 * kernel_estimates(16, 100, False).var()


def test_orthogonal_directions_are_orthogonal_and_as_long_as_normal_ones():
    projection = random_projection(4 * H, H, seed=3)
    for block in projection.reshape(4, H, H):
        products = block @ block.T
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-4)
    assert np.mean(projection**2) == pytest.approx(1, abs=0.15)
    assert random_projection(5, H).shape == (5, H)
    np.testing.assert_array_equal(random_projection(5, H, seed=2), random_projection(5, H, seed=2))


@pytest.mark.longer
def test_the_error_against_softmax_attention_falls_with_the_root_of_the_features():
    x = arrays()
    exact = run_jitted(flash_attention, *x)
    attend = jax.jit(lambda projection: performer_attention(*x, projection=projection))

    def error(features):
        outs = [attend(random_projection(features, H, seed=seed)) for seed in range(12)]
        return float(np.sqrt(np.mean([(out - exact) ** 2 for out in outs])))

    errors = [error(features) for features in (128, 1024, 8192)]
    assert errors[2] < 0.1 * float(jnp.sqrt(jnp.mean(exact**2)))
    for few, many in zip(errors, errors[1:], strict=False):
        assert 1.9 < few / many < 4.2, errors  # sqrt(8) = 2.83


def test_a_later_token_leaves_earlier_outputs_bit_by_bit():
    """Also one whose exponents are far above the rest, in the same chunk."""
    projection = random_projection(32, H)
    attend = jax.jit(lambda *x: performer_attention(*x, projection=projection))
    q, k, v = arrays(scale=1.0)
    other = [k.at[:, 20:].multiply(-30.0), v.at[:, 20:].add(5.0)]
    first = attend(q, k, v)
    second = attend(q, *other)
    np.testing.assert_array_equal(first[:, :20], second[:, :20])
    assert jnp.abs(first[:, 20:] - second[:, 20:]).max() > 0.1


@pytest.mark.parametrize("scale", [1e-3, 10.0, 100.0])
def test_large_and_small_inputs_stay_finite(scale):
    projection = random_projection(32, H)
    x = arrays(scale=scale)

    def loss(*x):
        out = performer_attention(*x, projection=projection)
        return (out**2).sum(), out

    gradients, out = run_jitted(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), *x)
    assert jnp.isfinite(out).all() and all(jnp.isfinite(g).all() for g in gradients)
    assert jnp.abs(out).max() <= jnp.abs(x[2]).max() * 1.001
    if scale < 1:  # equal weights: the mean of the values so far
        mean = jnp.cumsum(x[2], axis=1) / jnp.arange(1, T + 1)[None, :, None, None]
        np.testing.assert_allclose(out, mean, atol=1e-5)


@pytest.mark.longer
def test_the_scale_is_that_of_softmax_attention():
    projection = random_projection(8192, H)
    x = arrays()
    for scale in (0.05, 0.4):
        ours = run_jitted(lambda *x, s=scale: performer_attention(*x, projection=projection, scale=s), *x)
        exact = run_jitted(lambda *x, s=scale: flash_attention(*x, scale=s), *x)
        assert float(jnp.abs(ours - exact).mean()) < 0.05


@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_projections_and_scales_name_the_rule():
    x = arrays()
    with pytest.raises(ValueError, match=r"\[features, head dim 16\]; got \(4, 8\); make one with"):
        performer_attention(*x, projection=random_projection(4, 8))
    with pytest.raises(ValueError, match="scale must be greater than 0.*got -1"):
        performer_attention(*x, projection=random_projection(4, H), scale=-1)
    with pytest.raises(ValueError, match="at least 1; got 0 and 16"):
        random_projection(0, H)
