"""The MLP in chunks of the sequence: the same loss and gradients, and less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer, feed_forward_chunks, in_fp8
from jaxstack.precision import PrecisionConfig
from tests.small_runs import batch_at

pytestmark = pytest.mark.longer  # a few seconds each

ROWS = 4
LENGTH = 16
WIDTH = 64


def model_of(remat: str = "full", fp8: str = "none", dtype=jnp.float32, **changes) -> Transformer:
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=WIDTH, remat=remat, **changes
    )
    return in_fp8(Transformer(config, nnx.Rngs(0), dtype=dtype), PrecisionConfig(fp8=fp8))


def lowered(monkeypatch, tokens: int | None, **changes):
    """Loss and gradients with at most so many tokens of each sequence in a chunk, and their arguments."""
    model = model_of(**changes)
    bytes_of = ROWS * WIDTH * jnp.dtype(model.dtype).itemsize
    size = feed_forward_chunks.CHUNK_BYTES if tokens is None else tokens * bytes_of
    graphdef, params, non_params = nnx.split(model, nnx.Param, ...)
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, ROWS).items()}
    assert batch["tokens"].shape == (ROWS, LENGTH)

    def loss(params, non_params):
        return language_model_loss(nnx.merge(graphdef, params, non_params), batch).total

    with monkeypatch.context() as patch:
        patch.setattr(feed_forward_chunks, "CHUNK_BYTES", size)
        both = jax.value_and_grad(loss, argnums=(0, 1) if jax.tree.leaves(non_params) else 0)
        return jax.jit(both).lower(params, non_params), (params, non_params)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [pytest.param({"mlp": "plain", "mlp_bias": True}, 5, marks=pytest.mark.longer), ({"fp8": "delayed"}, 8)],
)
def test_chunks_change_nothing(monkeypatch, changes, tokens):
    """The last chunk of 5 is filled up."""
    programs = [lowered(monkeypatch, size, **changes) for size in (tokens, None)]
    results = [jax.tree.leaves(program.compile()(*arguments)) for program, arguments in programs]
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * float(jnp.abs(wanted).max()))


@pytest.mark.longer
def test_gradients_of_weights_are_added_up_in_float32(monkeypatch):
    """In bfloat16 each of 64 chunks would round the sum."""
    params = jax.random.normal(jax.random.key(0), (8, 8))
    x = jax.random.normal(jax.random.key(1), (1, 512, 8))
    module = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    module.kernel.value = params.astype(jnp.bfloat16)
    graphdef, state = nnx.split(module)

    def loss(state, most):
        def apply(module, x):
            return module(x)

        module = nnx.merge(graphdef, state)
        count = feed_forward_chunks.count_chunks(module, x.astype(jnp.bfloat16), 8, most)
        outputs = feed_forward_chunks.apply_in_chunks(apply, module, x.astype(jnp.bfloat16), count)
        return outputs.astype(jnp.float32).sum()

    exact = np.asarray(x.astype(jnp.bfloat16), np.float64).sum((0, 1))[:, None]
    gradient = {most: jax.tree.leaves(jax.grad(loss)(state, most))[0] for most in (2**30, 128)}
    off = {most: np.abs(np.asarray(g, np.float64) - exact).max() for most, g in gradient.items()}
    assert off[128] <= 1.01 * off[2**30], off


@pytest.mark.parametrize(("remat", "chunked"), [("full", True), ("save_attention", True), ("none", False)])
def test_only_what_is_computed_again_is_cut(monkeypatch, remat, chunked):
    loops = [lowered(monkeypatch, size, remat=remat)[0].as_text().count("stablehlo.while") for size in (4, None)]
    assert (loops[0] > loops[1]) == chunked
