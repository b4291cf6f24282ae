"""Attention to keys in random pages equals attention to the same keys in a row."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.paged_attention.api import paged_attention

PAGES = 30
SIZE = 4
LENGTHS = (17, 1, 5, 24)


@pytest.mark.longer
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"soft_cap": 3.0, "scale": 0.2}], ids=str)
def test_random_pages_give_the_attention_to_keys_in_a_row(queries, options):
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(len(LENGTHS), queries, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(random.normal(size=(PAGES, SIZE, 2, 8)), jnp.float32) for _ in range(2))
    table = random.permutation(PAGES)[: 6 * len(LENGTHS)].reshape(len(LENGTHS), 6).astype(np.int32)
    found = paged_attention(q, k, v, jnp.asarray(table), jnp.asarray(LENGTHS, jnp.int32), **options)
    for row, length in enumerate(LENGTHS):
        keys, values = (x[table[row]].reshape(1, -1, 2, 8)[:, :length] for x in (k, v))
        seen = min(queries, length)
        wanted = flash_attention(q[row : row + 1, queries - seen :], keys, values, **options)
        np.testing.assert_allclose(found[row, queries - seen :], wanted[0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(found).all()


@pytest.mark.longer
def test_values_in_the_first_channels_of_their_keys():
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(len(LENGTHS), 2, 4, 12)), jnp.float32)
    pages = jnp.asarray(random.normal(size=(PAGES, SIZE, 1, 12)), jnp.float32)
    table = jnp.asarray(random.permutation(PAGES)[: 6 * len(LENGTHS)].reshape(len(LENGTHS), 6), jnp.int32)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    found = paged_attention(q, pages, 8, table, lengths)
    wanted = paged_attention(q, pages, pages, table, lengths)[..., :8]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="a V from 1 to 12; got 13"):
        paged_attention(q, pages, 13, table, lengths)


def test_a_row_without_tokens_is_finite_and_an_unknown_backend_refused():
    q = jnp.ones((1, 1, 2, 8))
    pages = jnp.ones((2, SIZE, 1, 8))
    table = jnp.zeros((1, 1), jnp.int32)
    lengths = jnp.zeros(1, jnp.int32)
    assert np.isfinite(paged_attention(q, pages, pages, table, lengths)).all()
    with pytest.raises(ValueError, match="fast"):
        paged_attention(q, pages, pages, table, lengths, implementation="fast")
