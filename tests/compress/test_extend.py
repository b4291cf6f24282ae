"""A compression format in one file that is not shipped, used after training and during it: ternary weights."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack import TrainConfig, Trainer
from jaxstack.checkpoint.compressed import named_leaves, read_compressed
from jaxstack.compress.after_training.run import CompressOptions, compress
from jaxstack.compress.base import AfterTraining, DuringTraining, Format
from jaxstack.compress.config import CompressionConfig, Recipe
from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.run.evaluate import TextOptions, evaluate
from pallas_kernels.weight_only.packed import pack_lookup
from tests.compress.after_training.test_run import make_run

pytestmark = pytest.mark.longer  # a few seconds each


@dataclasses.dataclass(frozen=True)
class TernaryValues(Format):
    """Weights -s, 0 and s, with one s for each output (Li et al. 2016, arXiv:1605.04711)."""

    def pack(self, w):
        size = jnp.abs(w)
        large = size > 0.7 * jnp.mean(size, axis=1, keepdims=True)
        scale = jnp.sum(size * large, axis=1, keepdims=True) / jnp.maximum(jnp.sum(large, axis=1, keepdims=True), 1)
        table = scale * jnp.asarray([-1.0, 0.0, 1.0, 0.0])
        return pack_lookup(2, jnp.sign(w) * large + 1, table.astype(jnp.bfloat16))


class Ternary(AfterTraining, DuringTraining):
    method: Literal["ternary"] = "ternary"

    @property
    def format(self):
        return TernaryValues()

    @property
    def title(self):
        return "ternary"


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.second = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.gelu(self.first(x)))


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def test_after_training_a_model_is_stored_in_the_new_format(tmp_path):
    run = make_run(tmp_path, "compression.rules=[]")
    text = TextOptions([str(tmp_path / "text.txt")])
    recipe = Recipe(layers=(Ternary(path="mlp"),), store="float32")
    report = compress(run, recipe, tmp_path / "small", CompressOptions(text=text, layer_tokens=0))
    assert {row.method for row in report.rows if "mlp" in row.path} == {"ternary"}
    packed = named_leaves(read_compressed(tmp_path / "small")[0])["decoder/layers/0/mlp/up_proj/kernel"]
    assert packed.stored_bytes == 48 * 32 * 2 // 8 + 48 * 4 * 2
    for row in np.asarray(packed.matrix()):
        assert len(np.unique(np.abs(row[row != 0]))) == 1 and 0 < np.mean(row == 0) < 1
    measured = evaluate(tmp_path / "small", text=text).text
    assert report.loss_after is not None and measured is not None and report.loss_before is not None
    assert measured.loss == pytest.approx(report.loss_after.loss, rel=1e-6) != report.loss_before.loss


def test_during_training_a_step_computes_with_the_new_format():
    rules = CompressionConfig(rules=(Ternary(path="kernel"),)).rules
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 16)).astype(np.float32)
    data = [{"x": x, "y": np.tanh(x[:, :4])}] * 60
    train = TrainConfig(steps=60, global_batch_size=64)
    trainer = Trainer(compress_in_training(Model, rules), loss, data, optimizer=optax.adam(0.01), train=train)
    compression = trainer.module.view(Compression)
    params, non_params = jax.jit(trainer.module.init)(jax.random.key(0))
    before = loss(trainer.module.merge(params, non_params), data[0])
    trainer.fit()
    params = trainer.state.params
    assert loss(trainer.module.merge(params, non_params), data[0]) < 0.5 * before
    used = compression.use(params, None)[0]["first"]["kernel"]
    stored = params["first"]["kernel"]
    assert all(len(np.unique(np.abs(column[column != 0]))) == 1 for column in np.asarray(used).T)
    gradient = jax.grad(lambda w: jnp.sum(jnp.square(rules[0].format.round_in_training(w))))(stored.T)
    np.testing.assert_allclose(gradient, 2 * used.T, rtol=1e-6)  # straight through the rounding
    packed = compression.pack(params)["first/kernel"]
    recipe = Recipe(layers=(Ternary(path="kernel"),))
    again = recipe.layers[0].compress(stored.T, None)
    jax.tree.map(np.testing.assert_array_equal, packed, again)
    np.testing.assert_array_equal(packed.matrix().T, used)
