"""Trainable low rank: recovers singular values and principal components, and drops ranks for good."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.compress.formats.low_rank import split_by_svd
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.compress.solvers.maestro import LowRankRule, leading_rank_mask, trim
from tests.compilation import run_jitted

SIZE = 6
LAYOUT = MatrixLayout((SIZE, SIZE), stack=0, inputs=1)


def orthogonal(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(SIZE, SIZE)))[0]


def fit(target: jax.Array, rule: LowRankRule, steps: int) -> dict[str, jax.Array]:
    """Train factors from another matrix to a linear map of white inputs, with one draw of a rank in each step."""
    stored = rule.store(jnp.asarray(orthogonal(9), jnp.float32), LAYOUT)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))

    def step(carry, key):
        stored, state = carry

        def loss(stored):
            choice = jax.random.randint(key, (), 0, rule.number_of_choices(LAYOUT))
            w = LAYOUT.to_matrices(rule.use(stored, LAYOUT, choice))
            return jnp.sum(jnp.square(w - target)) + rule.loss_term(stored, LAYOUT)

        updates, state = optimizer.update(jax.grad(loss)(stored), state, stored)
        return (rule.keep(stored, optax.apply_updates(stored, updates)), state), None

    keys = jax.random.split(jax.random.key(0), steps)
    run = jax.jit(lambda stored: jax.lax.scan(step, (stored, optimizer.init(stored)), keys)[0][0])
    return run(stored)


@pytest.mark.longer
def test_training_recovers_singular_values_and_vectors():
    """Nested truncation of a linear map has the singular value decomposition as its optimum (Maestro, theorem 4.1)."""
    values = np.array([3.0, 2.2, 1.6, 1.1, 0.7, 0.4])
    left = orthogonal(1)
    right = orthogonal(2)
    stored = fit(jnp.asarray(left * values @ right.T, jnp.float32), LowRankRule(path=".*", penalty=0.0), 6000)
    u = np.asarray(stored["u"])
    v = np.asarray(stored["v"])
    found = np.linalg.norm(u, axis=0) * np.linalg.norm(v, axis=1)
    np.testing.assert_allclose(found, values, rtol=0.01)
    cosines = np.abs(np.sum(u / np.linalg.norm(u, axis=0) * left, axis=0))
    assert np.all(np.arccos(np.minimum(cosines, 1)) < 1e-2), np.arccos(np.minimum(cosines, 1))


@pytest.mark.longer
def test_the_penalty_finds_the_rank():
    """A map of rank 2 keeps two ranks; the others are exactly zero, and an export has no trace of them."""
    left = orthogonal(1)
    right = orthogonal(2)
    target = jnp.asarray(left[:, :2] * np.array([3.0, 2.0]) @ right[:, :2].T, jnp.float32)
    rule = LowRankRule(path=".*", penalty=0.02, threshold=1e-3)
    stored = fit(target, rule, 2000)
    u, v = trim(stored["u"], stored["v"])
    assert u.shape == (SIZE, 2) and v.shape == (2, SIZE)
    assert int(rule.kept(stored, LAYOUT)) == 2 * 2 * SIZE
    np.testing.assert_allclose(u @ v, LAYOUT.to_matrices(rule.export(stored, LAYOUT)), atol=1e-5)
    np.testing.assert_allclose(u @ v, target, atol=0.1)
    assert rule.pack(stored).stored_bytes == 2 * 2 * SIZE * 4


def test_factors_of_the_start_are_the_singular_value_decomposition():
    w = jax.random.normal(jax.random.key(0), (2, 5, 7))
    u, v = split_by_svd(w, 5)
    np.testing.assert_allclose(u @ v, w, atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(u, axis=-2), jnp.linalg.norm(v, axis=-1), rtol=1e-5)


def test_a_draw_truncates_one_matrix_of_a_stack():
    first = jnp.asarray([0, 3])
    masks = np.stack([leading_rank_mask(choice - first, 3) for choice in range(-3, 9)])
    np.testing.assert_array_equal(masks[[0, 1, 2, -3, -2, -1]], np.ones((6, 2, 3)))
    np.testing.assert_array_equal(masks[3:6, 0], np.tril(np.ones((3, 3))))
    np.testing.assert_array_equal(masks[6:9, 1], np.tril(np.ones((3, 3))))
    np.testing.assert_array_equal(masks[3:6, 1], np.ones((3, 3)))


def test_the_group_lasso_is_that_of_the_tails_and_has_a_gradient_at_zero():
    rule = LowRankRule(path=".*", penalty=0.5)
    stored = {"u": np.array([[3.0, 0.0], [4.0, 0.0]], np.float32), "v": np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)}
    expected = 0.5 * (5 + 0 + np.sqrt(1 + 4) + 2)
    value, gradient = run_jitted(jax.value_and_grad(lambda stored: rule.loss_term(stored, LAYOUT)), stored)
    assert float(value) == pytest.approx(expected)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_a_rank_that_was_dropped_stays_dropped():
    rule = LowRankRule(path=".*", threshold=1e-2)
    old = {"u": jnp.asarray([[1.0, 0.0, 1.0]]), "v": jnp.asarray([[1.0], [0.0], [1.0]])}
    new = {"u": jnp.asarray([[1.1, 5.0, 1e-3]]), "v": jnp.asarray([[1.0], [5.0], [1.0]])}
    kept = rule.keep(old, new)
    np.testing.assert_allclose(kept["u"], [[1.1, 0.0, 0.0]])
    np.testing.assert_allclose(kept["v"], [[1.0], [0.0], [0.0]])
