"""Modules with compressed weights: which rules hold, gradients of stored weights, every layout, other optimizers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.compress.config import CompressionConfig
from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.compress.formats.integer_grid import QatRule
from jaxstack.compress.formats.sparse import MaskRule
from jaxstack.compress.solvers.lsq import LsqRule
from jaxstack.compress.solvers.maestro import LowRankRule
from jaxstack.config.loader import build_component
from jaxstack.distill import DistillConfig, distillation_loss, with_teacher
from jaxstack.errors import ConfigError
from jaxstack.loop import LoopSettings
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.observe.config import ObserveConfig
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.run.build import make_trainer
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import Trainer, numpy_batches
from tests.compilation import run_jitted
from tests.small_runs import batch_at, run_steps, small_config

RULES = (
    "compression.rules=[{path: mlp, method: low_rank}, "
    "{path: attention/(q|k)_proj, method: lsq, bits: 3, group_size: 8}, "
    "{path: attention/(v|o)_proj, method: qat, bits: 8, group_size: null, activations: int8}, "
    "{path: embedding, method: cluster, bits: 4}]"
)


class Small(nnx.Module):
    """Two dense layers of Flax."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def squared_error(model: Small, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


SMALL_RULES = (LowRankRule(path="first", rank=2), QatRule(path="second", group_size=4))
DATA = {"x": np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), "y": np.ones((32, 2), np.float32)}


def small_trainer(module: Any, loss: Any, data: Any, optimizer: Any, *, rows: int = 32, steps: int = 10) -> Trainer:
    """A trainer on one device."""
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    train = TrainConfig(steps=steps, global_batch_size=rows)
    return Trainer(module, loss, data, optimizer=optimizer, mesh=mesh, train=train)


def test_rules_choose_by_path_and_the_state_holds_factors():
    module = compress_in_training(Small, SMALL_RULES)
    shapes = jax.tree.map(lambda x: x.shape, module.abstract_params)
    assert shapes["first"]["kernel"] == {"u": (8, 2), "v": (2, 4)} and shapes["second"]["kernel"] == (8, 2)

    def run(key):
        params = module.init(key)[0]
        return params["first"]["kernel"], module.load(params)["first"]["kernel"]

    factors, kernel = run_jitted(run, jax.random.key(0))
    np.testing.assert_allclose(kernel, (np.asarray(factors["u"]) @ factors["v"]).T, rtol=1e-6)
    assert compress_in_training(module, []) is module


@pytest.mark.longer
def test_the_packed_weights_are_those_that_the_model_computes_with():
    module = compress_in_training(Small, SMALL_RULES)
    params, _ = module.init(jax.random.key(0))
    packed = module.view(Compression).pack(params)
    exported = module.load(params)
    for name in ("first", "second"):
        np.testing.assert_allclose(packed[f"{name}/kernel"].dense(), exported[name]["kernel"], atol=1e-6)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([QatRule(path="third")], "'third' matches no parameter"),
        ([QatRule(path="first", group_size=4), MaskRule(path="kernel")], "a weight has one method"),
        ([QatRule(path="first", group_size=3)], "Groups of 3 do not divide a row of 4 weights"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: list, message: str):
    with pytest.raises(ConfigError, match=message):
        compress_in_training(Small, rules)
    same = CompressionConfig(rules=(QatRule(path="first", bits=8, group_size=4), QatRule(path=".", group_size=2)))
    assert compress_in_training(Small, same.rules).view(Compression).chosen["first/kernel"][0] is same.rules[0]


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigError, match="prune"):
        build_component(CompressionConfig, {"rules": [{"path": "x", "method": "prune"}]}, "compression")


def test_masks_hold_for_an_optimizer_that_moves_every_weight():
    start = Small(nnx.Rngs(0))
    start.first.kernel[...] = jnp.where(jnp.arange(8) % 2 == 0, 0.0, start.first.kernel[...])
    module = compress_in_training(start, [MaskRule(path="first")])
    noise = optax.chain(optax.add_noise(0.1, 0.0, 0), optax.sgd(0.1))
    trainer = small_trainer(module, squared_error, numpy_batches(DATA, 32), noise)
    before = np.asarray(trainer.state.params["first"]["kernel"]).copy()
    run_steps(trainer, 3)
    after = trainer.state.params["first"]["kernel"]
    np.testing.assert_array_equal(after == 0, before == 0)
    assert not np.any(np.asarray(after == before)[:, 1::2])
    np.testing.assert_array_equal(trainer.trained_module.first.kernel[...], after)


ROUNDED_INPUTS = QatRule(path="first", bits=8, group_size=None, activations="int8")
LEARNED_SCALES = LsqRule(path="first", bits=3, group_size=4)


@pytest.mark.parametrize("first", [LowRankRule(path="first", rank=3), ROUNDED_INPUTS, LEARNED_SCALES])
def test_a_stopped_run_goes_on_exactly(first, tmp_path):
    start = Small(nnx.Rngs(0))
    start.second.kernel[...] = jnp.where(jnp.arange(8)[:, None] % 2 == 0, 0.0, start.second.kernel[...])
    rules = [first, MaskRule(path="second")]
    settings = LoopSettings(observe=ObserveConfig(trackers=(), progress=False))

    def fit(name: str, steps: int) -> Trainer:
        module = compress_in_training(start, rules)
        trainer = small_trainer(module, squared_error, numpy_batches(DATA, 32), optax.adam(0.01), steps=steps)
        trainer.fit(tmp_path / name, settings)
        return trainer

    whole = fit("whole", 4)
    fit("stopped", 2)
    resumed = fit("stopped", 4)
    assert int(resumed.state.step) == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)
    assert not np.any(resumed.state.params["second"]["kernel"][::2])


def test_the_penalty_is_a_part_of_the_gradient():
    """One step of gradient descent moves a factor by the gradient of loss and penalty."""
    rule = LowRankRule(path="first", penalty=0.1)
    trainer = small_trainer(compress_in_training(Small, [rule]), squared_error, lambda step: DATA, optax.sgd(0.5))
    compression = trainer.module.view(Compression)
    assert compression is not None
    layout = compression.chosen["first/kernel"][1].layout
    before = jax.device_get(trainer.state.params)
    key = jax.random.fold_in(trainer.state.key, 0)
    choice = jax.random.randint(jax.random.fold_in(key, 2), (), 0, rule.number_of_choices(layout))

    def objective(stored: dict) -> jax.Array:
        kernel = rule.use(stored, layout, choice)
        used = {**before, "first": {**before["first"], "kernel": kernel}}
        model = nnx.merge(nnx.graphdef(Small(nnx.Rngs(0))), nnx.State(jax.tree.map(nnx.Param, used)))
        return squared_error(model, DATA) + rule.loss_term(stored, layout)

    factors = before["first"]["kernel"]
    expected = jax.tree.map(lambda x, g: x - 0.5 * g, factors, jax.grad(objective)(factors))
    run_steps(trainer, 1)
    found = trainer.state.params["first"]["kernel"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


LAYOUTS = [
    ["parallel.fsdp=2", "parallel.data=2", "train.gradient_accumulation=2"],
    pytest.param(["parallel.tensor=2", "parallel.fsdp=2"], marks=pytest.mark.exhaustive),
    pytest.param(["parallel.data=4", "parallel.zero=2"], marks=pytest.mark.exhaustive),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_device(layout: list[str]):
    def losses(*overrides: str) -> list[float]:
        config = small_config(RULES, "train.global_batch_size=8", *overrides)
        size = int(np.prod(list(config.parallel.degrees.values())))
        return run_steps(make_trainer(config, lambda step: batch_at(step, 8), jax.devices()[:size]), 2)

    np.testing.assert_allclose(losses(*layout), losses(), rtol=2e-3)


def test_a_teacher_is_learnt_from_and_stays_as_it_is():
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, vocab_size=64)
    teacher = Transformer(model, nnx.Rngs(7))
    settings = DistillConfig(alpha=1.0, temperature=1.0)

    def loss(student: Transformer, batch: Any) -> jax.Array:
        found = distillation_loss(student, batch, train=True, settings=settings)
        return found.total / found.count

    def make(rngs):
        return with_teacher(Transformer(model, rngs), teacher)

    trainer = small_trainer(make, loss, lambda step: batch_at(0, 8), optax.adamw(0.01), rows=8)
    before = np.asarray(trainer.state.params["teacher"]["head"])
    losses = run_steps(trainer, 8)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_array_equal(trainer.state.params["teacher"]["head"], before)
    assert "teacher" not in trainer.stored_state.params
    batch = batch_at(0, 8)
    tokens = jnp.asarray(batch["tokens"])

    def log(model):
        return jax.nn.log_softmax(model(tokens, segment_ids=jnp.asarray(batch["segment_ids"])))

    student = log(trainer.trained_module)
    target = log(teacher)
    counts = batch["labels"] != -100
    whole = np.sum(counts * np.sum(np.exp(target) * (target - student), axis=-1)) / counts.sum()
    found = loss(trainer.trained_module, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(float(found), whole, rtol=1e-3, atol=1e-5)
    assert float(language_model_loss(trainer.trained_module, jax.tree.map(jnp.asarray, batch)).total) > 0
