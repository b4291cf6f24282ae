"""Sophia-G: its rule in numpy, the sampled labels, and the estimate of the curvature."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.errors import ConfigError
from jaxstack.loss import LossSum, sampled_label_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.optim.base import RunInfo
from jaxstack.optim.optimizers import Sophia
from tests.small_runs import batch_at, make_trainer, run_steps, small_config


def test_the_rule_is_that_of_the_paper():
    settings = Sophia(b1=0.9, b2=0.8, rho=0.1)
    core = optax.with_extra_args_support(settings.core(RunInfo()))
    random = np.random.default_rng(0)
    state = core.init(jnp.zeros(6))
    m = h = np.zeros(6)
    for step in range(7):
        g = random.normal(size=6)
        c = 5 * random.random(6)
        found, state = core.update(
            jnp.asarray(g, jnp.float32), state, None, curvature=jnp.asarray(c, jnp.float32), renewed=step % 3 == 0
        )
        m = 0.9 * m + 0.1 * g
        h = 0.8 * h + 0.2 * c if step % 3 == 0 else h
        np.testing.assert_allclose(found, np.clip(m / np.maximum(0.1 * h, settings.eps), -1, 1), rtol=1e-4)
    assert np.count_nonzero(np.abs(found) < 1) > 0


def test_labels_are_drawn_from_the_predictions():
    """The mean loss of sampled labels is the entropy of the predictions."""
    from flax import nnx

    model = Transformer(ModelConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=8), nnx.Rngs(0))
    assert model.head is not None
    model.head[...] = 8 * model.head[...]
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 64, 16, 8).items()}
    logits = jax.nn.log_softmax(model(batch["tokens"], segment_ids=batch["segment_ids"]))
    counted = batch["labels"] != -100
    entropy = float(jnp.sum(-jnp.sum(jnp.exp(logits) * logits, -1) * counted))
    keys = jax.random.split(jax.random.key(1), 40)
    found = jax.lax.map(lambda key: sampled_label_loss(model, batch, key=key).total, keys)
    assert entropy < 0.97 * float(jnp.sum(counted)) * np.log(8), "the predictions are not uniform"
    error = float(jnp.std(found)) / np.sqrt(len(keys))
    assert abs(float(jnp.mean(found)) - entropy) < 4 * error


@pytest.mark.exhaustive
def test_a_language_model_learns():
    trainer = make_trainer(
        small_config("optimizer={name: sophia, learning_rate: 0.01, curvature_every: 2}", "train.global_batch_size=16")
    )
    losses = run_steps(trainer, 10)
    assert losses[-1] < losses[0] - 0.3
    (state,) = [s for s in jax.tree.leaves(trainer.state.optimizer, is_leaf=lambda s: hasattr(s, "curvature")) if
                hasattr(s, "curvature")]  # fmt: skip
    assert all(float(jnp.max(x)) > 0 and float(jnp.min(x)) >= 0 for x in jax.tree.leaves(state.curvature))


def test_a_loss_that_cannot_sample_labels_is_refused():
    from jaxstack.trainer import Trainer

    def loss(model, batch):
        return LossSum(jnp.sum(model(batch["tokens"])), jnp.ones(()))

    config = small_config("optimizer.name=sophia")
    with pytest.raises(ConfigError, match="does not say how: declare it with @jaxstack.loss.samples_labels"):
        Trainer(lambda rngs: Transformer(config.model, rngs), loss, lambda step: batch_at(step, 8), optimizer=Sophia())
