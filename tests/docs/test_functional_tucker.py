"""The state-space form equals a dense Gaussian process, and the moments of an entry those of samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import load_example

example = load_example("functional_tucker")
RATE = 6.0
TIMES = np.array([0.0, 1e-4, 0.03, 0.05, 0.4, 0.45, 0.451, 0.9])
GAPS = jnp.asarray(np.diff(TIMES, prepend=-example.FAR), jnp.float32)


def matern(times):
    x = RATE * np.abs(times[:, None] - times)
    return (1 + x) * np.exp(-x)


def test_chain_has_the_covariance_of_the_kernel():
    a, q = (np.asarray(x, np.float64) for x in example.transitions(GAPS, RATE))
    states = [np.zeros((2, 0))]  # in terms of independent innovations
    for step, innovation in zip(a, q, strict=True):
        states.append(np.concatenate([step @ states[-1], np.linalg.cholesky(innovation)], 1))
    values = np.stack([np.pad(x[0], (0, 2 * len(TIMES) - x.shape[1])) for x in states[1:]])
    np.testing.assert_allclose(values @ values.T, matern(TIMES), atol=2e-5)


def test_smoother_equals_a_dense_gaussian_process():
    values = np.sin(7 * TIMES)
    noise = np.linspace(0.02, 0.5, len(TIMES))
    mean, variance, evidence = example.smooth(jnp.float32(values), jnp.float32(noise), GAPS, RATE)
    kernel = matern(TIMES)
    total = matern(TIMES) + np.diag(noise)
    solved = np.linalg.solve(total, values)
    np.testing.assert_allclose(mean, kernel @ solved, atol=1e-4)
    np.testing.assert_allclose(variance, np.diag(kernel - kernel @ np.linalg.solve(total, kernel)), atol=1e-4)
    dense = -0.5 * (values @ solved + np.linalg.slogdet(total)[1] + len(TIMES) * np.log(2 * np.pi))
    assert float(evidence) == pytest.approx(dense, abs=1e-3)


@pytest.mark.longer
def test_unrelated_indices_have_independent_priors():
    far = jnp.full(3, example.FAR)
    mean, variance, _ = example.smooth(jnp.array([1.0, 2.0, 4.0]), jnp.ones(3), far, RATE)
    np.testing.assert_allclose(mean, [0.5, 1.0, 2.0], rtol=1e-5)
    np.testing.assert_allclose(variance, 0.5, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.trains
def test_moments_of_an_entry_equal_those_of_samples(monkeypatch):
    monkeypatch.setattr(example, "COORDINATES", 20)
    coordinates, _ = example.make_tensor(0)
    model = example.FunctionalTucker(coordinates, True, nnx.Rngs(0))
    model.core_log_deviation.set_value(jnp.full_like(model.core_log_deviation[...], -1.0))
    index = np.array([[5, 7, 19], [12, 0, 17]], np.int32)
    mean, variance, _ = model(index)
    middle, spread, _ = model.factors()
    keys = jax.random.split(jax.random.key(0), 4)
    parts = [
        middle[index[:, k], :, k] + jnp.sqrt(spread[index[:, k], :, k]) * jax.random.normal(key, (5_000, 2, 4, 2))
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
