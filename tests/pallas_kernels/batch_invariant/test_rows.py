"""The result of a row does not depend on the other rows, nor on their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention, grouped_matmul, linear_cross_entropy, rms_norm
from pallas_kernels.batch_invariant.attention import attend_pages, attend_whole
from pallas_kernels.batch_invariant.cross_entropy import invariant_cross_entropy
from pallas_kernels.batch_invariant.mode import batch_invariant
from pallas_kernels.batch_invariant.product import GROUP_TILE, matmul
from pallas_kernels.batch_invariant.rows import sum_row

DTYPES = [jnp.float32, jnp.bfloat16]


def in_fixed_order(*arrays: jax.Array) -> jax.Array:
    with batch_invariant():
        return grouped_matmul(*arrays, alignment=GROUP_TILE)


def values(*shape: int, seed: int = 0, dtype: object = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_together(dtype):
    x = values(70, 48, dtype=dtype)
    weight = values(48, 40, seed=1, dtype=dtype)
    gain = values(48, seed=2)
    labels = jnp.arange(70, dtype=jnp.int32) % 40

    def results(x: jax.Array, labels: jax.Array) -> list[jax.Array]:
        with batch_invariant():
            normalized = rms_norm(x, gain)
        entropy = invariant_cross_entropy(x, weight, labels, ignore_index=-100, temperature=0.7, soft_cap=5.0)
        return [matmul(x, weight), normalized, sum_row(x.astype(jnp.float32)), entropy]

    compiled = jax.jit(results)
    together = compiled(x, labels)
    for first, count in ((0, 1), (3, 1), (33, 20), (69, 1)):
        part = slice(first, first + count)
        for one, other in zip(compiled(x[part], labels[part]), together, strict=True):
            np.testing.assert_array_equal(one, other[part])


@pytest.mark.longer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_newest_token_attends_as_in_the_whole_sequence(dtype):
    """With pages of 4 tokens in any order, for decoding and for a chunk of a prompt."""
    q, k, v = (values(2, 24, heads, 8, seed=heads + seed, dtype=dtype) for heads, seed in ((4, 0), (2, 0), (2, 1)))
    options = {"scale": 0.3, "window": 9, "soft_cap": 4.0}
    whole = jax.jit(lambda *arrays: attend_whole(*arrays, **options))(q, k, v)
    order = jnp.asarray(np.random.default_rng(3).permutation(12), jnp.int32)
    pages = [jnp.zeros((12, 4, 2, 8), dtype).at[order].set(x.reshape(12, 4, 2, 8)) for x in (k, v)]
    table = order.reshape(2, 6)
    attend = jax.jit(lambda *arrays: attend_pages(*arrays, **options))
    for first, end in ((22, 23), (23, 24), (4, 15), (0, 3)):
        found = attend(q[:, first:end], *pages, table, jnp.full(2, end, jnp.int32))
        np.testing.assert_array_equal(found, whole[:, first:end])


@pytest.mark.longer
def test_values_and_gradients_are_those_of_the_usual_kernels():
    x, weights = values(3 * GROUP_TILE, 32), values(3, 32, 24, seed=1)
    sizes = jnp.array([GROUP_TILE, 0, 10], jnp.int32)
    x = jnp.where((jnp.arange(len(x)) < GROUP_TILE + 10)[:, None], x, 0)
    q, k, v = values(2, 24, 4, 8), values(2, 24, 2, 8, seed=1), values(2, 24, 2, 8, seed=2)
    labels = jnp.arange(len(x), dtype=jnp.int32) % 24
    pairs = [
        (lambda *a: in_fixed_order(*a, sizes),
         lambda *a: grouped_matmul(*a, sizes, alignment=GROUP_TILE), (x, weights)),
        (matmul, jnp.matmul, (x, weights[0])),
        (lambda *a: attend_whole(*a, scale=0.3), lambda *a: flash_attention(*a, causal=True, scale=0.3), (q, k, v)),
        (lambda *a: invariant_cross_entropy(*a, labels, ignore_index=2, temperature=0.5, soft_cap=5.0),
         lambda h, w: linear_cross_entropy(h / 0.5, w, labels, ignore_index=2, soft_cap=10.0), (x, weights[0])),
    ]  # fmt: skip
    for one, other, arrays in pairs:
        found, back = jax.vjp(one, *arrays)
        wanted, usual_back = jax.vjp(other, *arrays)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        for gradient, usual in zip(back(found), usual_back(found), strict=True):
            np.testing.assert_allclose(gradient, usual, rtol=1e-4, atol=1e-4)
