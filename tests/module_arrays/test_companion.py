"""A frozen companion in a user's own module: not trained, not saved, and carried from one train state to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.pipeline_order import PipelineOrder
from jaxstack.module_arrays.views import with_views
from jaxstack.optim.base import GroupRule
from jaxstack.optim.optimizers import SGD
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import Trainer
from jaxstack.worker_steps import features_of

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Student(nnx.Module):
    """A layer that learns what its teacher, a layer of the same shape, computes."""

    companions = {"teacher": "distillation"}

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)
        self.teacher = nnx.Linear(4, 2, rngs=rngs)


def difference(model: Student, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model.layer(batch["x"]) - model.teacher(batch["x"])))


def make_trainer(optimizer: Any) -> Trainer:
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    train = TrainConfig(steps=2, global_batch_size=8)
    return Trainer(Student, difference, lambda step: {"x": X}, optimizer=optimizer, mesh=mesh, train=train)


TRAINED = SGD(learning_rate=0.1, groups=(GroupRule(path="teacher", frozen=False),))


@pytest.mark.parametrize("optimizer", [TRAINED, optax.sgd(0.1, momentum=0.9)], ids=["of a rule", "of optax"])
def test_no_optimizer_trains_a_companion_and_no_checkpoint_has_it(optimizer):
    trainer = make_trainer(optimizer)
    before = jax.device_get(trainer.state.params)
    trainer.train_step(trainer.put({"x": X}))
    after = jax.device_get(trainer.state.params)
    jax.tree.map(np.testing.assert_array_equal, after["teacher"], before["teacher"])
    assert np.abs(after["layer"]["kernel"] - before["layer"]["kernel"]).max() > 1e-3
    assert {x.shape for x in jax.tree.leaves(trainer.state.optimizer) if x.ndim} <= {(4, 2), (2,)}
    assert sum(x.ndim > 0 for x in jax.tree.leaves(trainer.state.optimizer)) == 2, "moments of the student alone"
    assert list(trainer.stored_state.params) == list(trainer.abstract_stored_state.params) == ["layer"]
    assert list(trainer.start_shapes[0]) == ["layer"] and list(trainer.start_shapes[1]) == ["teacher"]


def test_a_state_from_a_checkpoint_or_a_start_keeps_the_companion_that_was_loaded():
    trainer = make_trainer(optax.sgd(0.1))
    own = jax.tree.map(jnp.ones_like, trainer.state.params["teacher"])
    trainer.load_unsaved({"teacher": jax.tree.map(jnp.copy, own)})
    trainer.stored_state = trainer.stored_state
    np.testing.assert_array_equal(trainer.state.params["teacher"]["kernel"], own["kernel"])
    trainer.load_unsaved({"teacher": {"bias": jnp.full(2, 3.0)}})
    trainer.start_from({"layer": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}})
    found = trainer.state.params
    np.testing.assert_array_equal(found["teacher"]["kernel"], own["kernel"])
    np.testing.assert_array_equal(found["teacher"]["bias"], [3, 3])
    assert not found["layer"]["kernel"].any()


def test_workers_and_a_pipeline_refuse_companions():
    assert features_of(make_trainer(optax.sgd(0.1))) == ["distillation"]
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, vocab_size=64)

    def make(rngs: nnx.Rngs) -> Transformer:
        model = Transformer(config, rngs)
        model.attach("teacher", Transformer(config, rngs), "distillation")
        return model

    with pytest.raises(ConfigError, match=r"a model with a teacher does not support a pipeline; set parallel\.pipe"):
        with_views(make, [PipelineOrder(2, 1)])
