"""Activations in integers: exact block products, the softmax of integers, and a model whose layers use both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.solvers.bct import (
    BLOCK,
    encode_blocks,
    in_integers,
    integer_matmul,
    integer_softmax,
    round_blocks,
    round_tiles,
)
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention.linear import LinearAttention
from pallas_kernels.weight_only.formats import powers_of_two
from tests.compilation import run_jitted


@pytest.mark.longer
def test_integer_products_are_those_of_the_rounded_operands():
    x = jax.random.normal(jax.random.key(0), (9, 128)) * 10
    w = jax.random.normal(jax.random.key(1), (64, 128))
    q, exponents = encode_blocks(x)
    w_q, w_exponents = round_tiles(w, 4, BLOCK)
    by_row = jnp.repeat(w_exponents, BLOCK, axis=0)
    dense = np.asarray(w_q * jnp.repeat(powers_of_two(by_row), BLOCK, axis=1), np.float64)
    wanted = np.asarray(round_blocks(x), np.float64) @ dense.T
    np.testing.assert_allclose(integer_matmul(q, exponents, w_q, by_row), wanted, rtol=1e-6, atol=1e-5)


def test_rounded_activations_err_by_at_most_a_step():
    x = np.random.default_rng(0).normal(size=(5, 3, 96)).astype(np.float32)  # blocks of 32
    (q, exponents), rounded = run_jitted(lambda x: (encode_blocks(x), round_blocks(x)), x)
    assert exponents.shape == (5, 3, 3) and q.dtype == jnp.int8
    step = np.repeat(2.0 ** np.asarray(exponents, np.float64), 32, -1)
    assert (np.abs(rounded - x) <= step).all()
    assert jax.eval_shape(round_blocks, jnp.zeros(96, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.longer
def test_the_softmax_of_integers_is_near_the_exact_one():
    scores = jax.random.normal(jax.random.key(0), (4, 7, 40)) * 4
    visible = jnp.arange(40) <= jnp.arange(7)[:, None] * 6
    exact = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    found = integer_softmax(scores, visible)
    assert float(jnp.where(visible, 0, found).max()) == 0
    assert float(jnp.abs(found - exact).max()) < 0.02
    np.testing.assert_allclose(found.sum(-1), 1, atol=0.02)
    alone = integer_softmax(jnp.array([[3.0, 9.0]]), jnp.array([[True, False]]))
    np.testing.assert_allclose(alone, [[1.0, 0.0]], atol=0.01)


@pytest.mark.longer
def test_a_model_in_integers_computes_nearly_the_same():
    config = ModelConfig(
        vocab_size=61, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64,
        initialization="fan_in", scan_layers=False, layer_types=("sliding_attention", "full_attention"),
        sliding_window=5,
    )  # fmt: skip
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 24)), jnp.int32)
    run = nnx.jit(lambda model, tokens: model.hidden(tokens, segment_ids=jnp.arange(24)[None] // 12 + 0 * tokens))
    exact = run(Transformer(config, nnx.Rngs(0)), tokens)
    found = run(in_integers(Transformer(config, nnx.Rngs(0))), tokens)
    error = float(jnp.square(found - exact).mean() / jnp.square(exact).mean())
    assert 1e-7 < error < 5e-3
    with pytest.raises(ValueError, match="has no cache"):
        in_integers(Transformer(config, nnx.Rngs(0))).make_cache(1, 8)


@pytest.mark.quick
def test_other_attention_is_refused():
    config = ModelConfig(vocab_size=61, hidden_size=32, num_layers=1, num_heads=2, attention=LinearAttention())
    with pytest.raises(ValueError, match="found attention.name linear"):
        nnx.eval_shape(lambda: in_integers(Transformer(config, nnx.Rngs(0))))
