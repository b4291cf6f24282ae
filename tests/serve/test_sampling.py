"""Sampling with settings per row equals sampling with the same settings for all rows."""

import jax
import numpy as np
import pytest

from jaxstack.decoding.sampling import (
    RowSampling,
    Sampling,
    apply_bitmask,
    keep_likeliest_rows,
    sample_rows,
)
from tests.decoding.plain_sampling import keep_likeliest, sample

SETTINGS = [
    Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.6), Sampling(1.0, min_p=0.05),
    Sampling(0.9, top_k=20, top_p=0.8, min_p=0.01), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6),
]  # fmt: skip
V = 200


@pytest.fixture(scope="module")
def logits():
    return (np.random.default_rng(0).normal(size=(len(SETTINGS), V)) * 3).astype(np.float32)


def rows(settings) -> RowSampling:
    n = len(settings)
    return RowSampling(
        np.arange(n, dtype=np.uint32) + 7,
        np.arange(n, dtype=np.int32),
        np.array([s.temperature for s in settings], np.float32),
        np.array([s.top_k or V for s in settings], np.int32),
        np.array([s.top_p or 1 for s in settings], np.float32),
        np.array([s.min_p or 0 for s in settings], np.float32),
    )


def test_each_row_has_the_sample_of_its_own_settings(logits):
    """With settings as arrays: one program for all of them."""
    step = jax.jit(sample_rows, static_argnums=2)
    for turn in range(3):
        order = np.roll(np.arange(len(SETTINGS)), turn)
        settings = rows([SETTINGS[i] for i in order])
        found = np.asarray(step(logits, settings, "limited"))
        for row, setting in enumerate(order):
            key = jax.random.fold_in(jax.random.key(settings.seed[row]), settings.number[row])
            assert found[row] == sample(logits[row : row + 1], key[None], SETTINGS[setting])[0]
    assert step._cache_size() == 1


@pytest.mark.parametrize(("k", "p", "m"), [(3, 1.0, 0.0), (V, 0.5, 0.0), (V, 1.0, 0.2), (50, 0.9, 0.02), (1, 0.1, 1.0)])
def test_the_limits_keep_the_tokens_of_a_sort(logits, k, p, m):
    logits = np.round(logits)  # with ties
    n = len(logits)
    found = keep_likeliest_rows(logits, np.full(n, k), np.full(n, p, np.float32), np.full(n, m, np.float32))
    np.testing.assert_array_equal(found, keep_likeliest(logits, k, p, m))


def test_cheaper_modes_agree_where_they_apply(logits):
    free = rows([Sampling(0.0), Sampling(1.0)] * 4)
    np.testing.assert_array_equal(sample_rows(logits, free, "free"), sample_rows(logits, free, "limited"))
    greedy = rows([Sampling(0.0)] * 8)
    np.testing.assert_array_equal(sample_rows(logits, greedy, "greedy"), np.argmax(logits, -1))


def test_a_bitmask_allows_the_tokens_of_its_bits(logits):
    allowed = np.random.default_rng(1).random((len(SETTINGS), V)) < 0.3
    words = np.packbits(np.pad(allowed, ((0, 0), (0, -V % 32))), axis=1, bitorder="little").view("<i4")
    np.testing.assert_array_equal(apply_bitmask(logits, words), np.where(allowed, logits, -np.inf))
