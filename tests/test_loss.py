"""The loss whose gradients are computed beside it, in chunks, in whole training steps and in every kind of layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer
from jaxstack.state import TrainState
from pallas_kernels import record_choices
from pallas_kernels.cross_entropy import xla, xla_dense
from tests.small_runs import VOCABULARY, batch_at, make_trainer, run_steps, small_config

pytestmark = pytest.mark.longer  # a few seconds each

SHAPE = ("train.global_batch_size=16", "optimizer.eps=1e-4", "train.z_loss=0.001", "model.final_logit_softcapping=20")


@functools.cache
def initial_state() -> TrainState:
    return jax.device_get(make_trainer(small_config(*SHAPE)).state)


def losses(*overrides: str) -> list[float]:
    """Four steps from the same state in every layout."""
    trainer = make_trainer(small_config(*SHAPE, *overrides))
    start = initial_state()
    trainer.state = jax.device_put(start._replace(key=jax.random.clone(start.key)), trainer.shardings)
    return run_steps(trainer, 4)


@functools.cache
def losses_of_dense_logits() -> list[float]:
    return losses()


@pytest.fixture
def chunks(monkeypatch):
    """Four chunks and one shorter for the 16 x 16 tokens on one device."""
    losses_of_dense_logits()
    monkeypatch.setattr(xla_dense, "MAX_LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "CHUNK_BYTES", 4 * VOCABULARY * 60)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.data=2", "parallel.fsdp=2", "train.gradient_accumulation=2"),
        ("parallel.tensor=4",),
        ("parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true"),
    ],
    ids=" ".join,
)
def test_chunks_in_every_layout_train_as_dense_logits_on_one_device(overrides, chunks):
    with record_choices() as choices:
        found = losses(*overrides)
    assert {c.backend for c in choices if c.operation == "linear_cross_entropy_sum"} == {"xla"}
    np.testing.assert_allclose(found, losses_of_dense_logits(), rtol=1e-5)


def test_the_gradient_of_a_stored_float32_head_is_not_rounded(chunks):
    """In bfloat16 compute the head's gradient is summed up, and comes back, in the float32 that it is stored in."""
    model = Transformer(small_config().model, nnx.Rngs(0), dtype=jnp.bfloat16)
    graphdef, state = nnx.split(model)
    batch = jax.tree.map(jnp.asarray, batch_at(0, 16))

    def total(state: nnx.State) -> jax.Array:
        return language_model_loss(nnx.merge(graphdef, state), batch).total

    gradient = jax.jit(jax.grad(total))(state)["head"][...]
    assert gradient.dtype == jnp.float32
    assert (gradient.astype(jnp.bfloat16).astype(jnp.float32) != gradient).mean() > 0.5
