"""The state-space form equals a dense Gaussian process, and the moments of an entry those of samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.fields import load_example

example = load_example("functional_tucker")
RATE = 6.0
TIMES = np.array([0.0, 1e-4, 0.03, 0.05, 0.4, 0.45, 0.451, 0.9])
GAPS = jnp.asarray(np.diff(TIMES, prepend=-example.FAR), jnp.float32)


def matern(times):
    x = RATE * np.abs(times[:, None] - times)
    return (1 + x) * np.exp(-x)


def innovations_to_values():
    """[n, n, 2]: the values are linear in the innovations."""
    zero = jnp.zeros((len(TIMES), 2))
    return np.asarray(jax.jacobian(lambda e: example.smooth(e, zero, GAPS, RATE)[0])(zero), np.float64)


def test_chain_has_the_covariance_of_the_kernel():
    matrix = innovations_to_values().reshape(len(TIMES), -1)
    np.testing.assert_allclose(matrix @ matrix.T, matern(TIMES), atol=2e-5)
    assert np.allclose(np.triu(innovations_to_values()[..., 0], 1), 0), "values depend on earlier innovations only"


def test_variances_are_those_of_independent_innovations():
    matrix = innovations_to_values().reshape(len(TIMES), -1)
    deviations = jax.random.uniform(jax.random.key(0), (len(TIMES), 2))
    _, variance = example.smooth(jnp.zeros((len(TIMES), 2)), deviations, GAPS, RATE)
    np.testing.assert_allclose(variance, matrix**2 @ np.asarray(deviations).ravel() ** 2, rtol=1e-4)


def test_smoother_equals_a_dense_gaussian_process():
    values, noise = np.sin(7 * TIMES), 0.04
    matrix = innovations_to_values().reshape(len(TIMES), -1)
    best = matrix.T @ np.linalg.solve(matrix @ matrix.T + noise * np.eye(len(TIMES)), values)
    smoothed, _ = example.smooth(jnp.asarray(best.reshape(-1, 2), jnp.float32), jnp.zeros((len(TIMES), 2)), GAPS, RATE)
    kernel = matern(TIMES)
    dense = kernel @ np.linalg.solve(kernel + noise * np.eye(len(TIMES)), values)
    np.testing.assert_allclose(smoothed, dense, atol=1e-4)


def test_moments_of_an_entry_equal_those_of_samples():
    coordinates, _ = example.make_tensor(0)
    model = example.FunctionalTucker(coordinates, True, nnx.Rngs(0))
    model.core_log_deviation.set_value(jnp.full_like(model.core_log_deviation[...], -1.0))
    index = np.array([[5, 70, 200], [299, 0, 17]], np.int32)
    mean, variance = model(index)
    level, spread = model.factors()
    keys = jax.random.split(jax.random.key(0), 4)
    parts = [
        level[index[:, k], :, k] + jnp.sqrt(spread[index[:, k], :, k]) * jax.random.normal(key, (5_000, 2, 4, 2))
        for k, key in enumerate(keys[:3])
    ]
    core = model.core[...] + jnp.exp(-1.0) * jax.random.normal(keys[3], (5_000, *model.core.shape))
    samples = jnp.einsum("srijk,sbri,sbrj,sbrk->sbr", core, *parts)
    np.testing.assert_allclose(mean, samples.mean(0), atol=4 * float(samples.std()) / 5_000**0.5)
    np.testing.assert_allclose(variance, samples.var(0), rtol=0.2)


@pytest.mark.exhaustive
def test_a_few_steps_raise_the_bound():
    coordinates, entries = example.make_tensor(0)
    index = np.random.default_rng(0).integers(0, 300, (64, 3)).astype(np.int32)
    rows = {"index": index, "value": entries(index)}
    before = example.bounds(example.FunctionalTucker(coordinates, True, nnx.Rngs(0)), rows)
    model, best = example.train(coordinates, True, rows, 4, seed=0)
    after = example.bounds(model, rows)
    assert float(after.mean()) < float(before.mean()) and float(after[best]) == float(after.min())
