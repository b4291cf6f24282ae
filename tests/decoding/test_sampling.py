"""From logits to tokens: masks are exact, draws follow the probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstack.decoding.sampling import RowSampling, Sampling, keep_likeliest_rows, sample_rows

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LIMIT = jax.jit(keep_likeliest_rows)
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))[None]


def keep_likeliest(logits, top_k=None, top_p=None, min_p=None) -> jax.Array:
    """The product's function with the same limits for all rows."""
    n = len(logits)
    limits = np.full(n, top_k or logits.shape[1]), np.full(n, 1 if top_p is None else top_p), np.full(n, min_p or 0)
    return LIMIT(logits, *(x.astype(t) for x, t in zip(limits, (np.int32, np.float32, np.float32), strict=True)))


def sample(logits, seeds, temperature: float) -> jax.Array:
    n = len(logits)
    ones = np.ones(n, np.float32)
    numbers = np.zeros(n, np.int32)
    rows = RowSampling(
        np.asarray(seeds, np.uint32), numbers, temperature * ones, np.full(n, logits.shape[1]), ones, 0 * ones
    )
    return sample_rows(logits, rows, "free")


def kept(top_k=None, top_p=None, min_p=None) -> list[int]:
    return np.flatnonzero(np.isfinite(np.asarray(keep_likeliest(LOGITS, top_k, top_p, min_p))[0])).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "wanted"),
    [
        (None, None, [0, 1, 2, 3, 4]), (1, None, [1]), (2, None, [1, 3]), (4, None, [0, 1, 3, 4]),
        (9, None, [0, 1, 2, 3, 4]), (None, 0.3, [1]), (None, 0.5, [1, 3]), (None, 0.64, [1, 3]), (None, 0.7, [1, 3, 4]),
        (None, 1.0, [0, 1, 2, 3, 4]), (None, 1e-9, [1]), (3, 0.7, [1, 3]), (2, 0.99, [1, 3]),
    ],
)  # fmt: skip
def test_masks(top_k, top_p, wanted):
    """With both, top_p counts what top_k has left: 0.4 and 0.25 of 0.85 are more than 0.7."""
    assert kept(top_k, top_p) == wanted


@pytest.mark.parametrize(
    ("min_p", "wanted"), [(0.0, [0, 1, 2, 3, 4]), (0.2, [0, 1, 3, 4]), (0.45, [1, 3, 4]), (0.6, [1, 3]), (1.0, [1])]
)
def test_min_p_is_a_share_of_the_likeliest(min_p, wanted):
    assert kept(min_p=min_p) == wanted


def test_a_row_with_its_own_key_draws_as_if_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)
    together = sample(logits, range(6), 1.0)
    alone = [int(sample(logits[row : row + 1], [row], 1.0)[0]) for row in range(6)]
    assert together.tolist() == alone and len(set(alone)) > 1


def test_what_is_kept_keeps_its_logits():
    masked = keep_likeliest(LOGITS, 2, None)
    np.testing.assert_array_equal(masked[0, [1, 3]], LOGITS[0, [1, 3]])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.floats(0.01, 1.0), st.integers(0, 2**31 - 1))
def test_at_least_one_and_the_likeliest_is_left(top_k, top_p, seed):
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 7)) * 3, jnp.float32)
    left = np.isfinite(np.asarray(keep_likeliest(logits, top_k, top_p)))
    assert left[np.arange(3), np.argmax(logits, -1)].all() and (left.sum(-1) <= top_k).all()


def test_zero_temperature_takes_the_likeliest():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 9)), jnp.float32)
    found = sample(logits, range(4), 0.0)
    assert found.dtype == jnp.int32 and found.tolist() == np.argmax(logits, -1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_probabilities(temperature):
    many = jnp.broadcast_to(LOGITS, (20000, 5))
    found = np.bincount(sample(many, range(20000), temperature), minlength=5) / 20000
    wanted = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=0.015)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 2}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
