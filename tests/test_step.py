"""The pure train step and the losses: sums over microbatches, skipped steps, keys, what a user's loss may return."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxstack.loss import LossSum, as_loss_sum, language_model_loss
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import ModuleArrays, make_arrays
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.state import init_state
from jaxstack.step import StepFunctions
from tests.small_runs import batch_at, small_config


class Line(nnx.Module):
    """y = w x, with a count of its calls beside the parameter."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls.set_value(self.calls[...] + 1)
        return x @ self.w[...]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def step_of(loss, accumulation: int = 1, devices: int = 1, optimizer=None):
    rules = make_rules(make_mesh(devices=jax.devices()[:devices]))
    module = ModuleArrays(Line)
    optimizer = optimizer or optax.sgd(0.1)
    steps = StepFunctions(module, loss, optimizer, None, rules, accumulation=accumulation)
    return jax.jit(steps.train_step), init_state(module, optimizer, jax.random.key(0))


BATCH = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)), jnp.float32), "y": jnp.ones(8)}


def test_one_step_is_gradient_descent():
    step, state = step_of(squares)
    new, metrics = step(state, BATCH)
    w = np.array([1.0, 2.0])
    error = BATCH["x"] @ w - 1
    gradient = 2 * BATCH["x"].T @ error / 8
    np.testing.assert_allclose(new.params["w"], w - 0.1 * gradient, rtol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(error**2)), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-5)
    assert int(new.step) == 1 and float(new.non_params["calls"]) == 1


@pytest.mark.parametrize(("accumulation", "devices"), [(2, 1), (4, 2), (2, 4)])
def test_accumulation_is_one_step_of_the_whole_batch(accumulation, devices):
    def weighted(model, batch):
        error = (model(batch["x"]) - batch["y"]) ** 2 * batch["count"]
        return LossSum(error.sum(), batch["count"].sum())

    batch = {**BATCH, "count": jnp.array([1.0, 0, 0, 0, 2, 3, 1, 0])}
    (step, state), (whole, start) = step_of(weighted, accumulation, devices), step_of(weighted)
    (new, metrics), (wanted, expected) = step(state, batch), whole(start, batch)
    np.testing.assert_allclose(new.params["w"], wanted.params["w"], rtol=1e-5)
    for name in ("loss", "grad_norm", "count"):
        assert float(metrics[name]) == pytest.approx(float(expected[name]), rel=1e-5)
    assert float(metrics["count"]) == 7
    assert float(new.non_params["calls"]) == accumulation, "variables are carried from one microbatch to the next"


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_step_that_is_not_finite_changes_nothing(poison):
    step, state = step_of(squares, optimizer=optax.adam(0.1))
    state, _ = step(state, BATCH)
    bad, metrics = step(state, {**BATCH, "y": BATCH["y"].at[3].set(poison)})
    jax.tree.map(np.testing.assert_array_equal, bad.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, bad.optimizer, state.optimizer)
    jax.tree.map(np.testing.assert_array_equal, bad.non_params, state.non_params)
    assert int(bad.step) == 2 and int(metrics["skipped"]) == 1
    worse, metrics = step(bad, {**BATCH, "y": BATCH["y"] + poison})
    assert int(metrics["skipped"]) == 2
    good, metrics = step(worse, BATCH)
    assert int(metrics["skipped"]) == 0 and int(good.step) == 4
    assert float(jnp.abs(good.params["w"] - state.params["w"]).max()) > 0


def test_a_batch_without_items_moves_nothing():
    step, state = step_of(lambda model, batch: LossSum(model(batch["x"]).sum() * 0, 0.0))
    new, metrics = step(state, BATCH)
    np.testing.assert_array_equal(new.params["w"], state.params["w"])
    assert float(metrics["loss"]) == 0 and int(metrics["skipped"]) == 0


def test_keys_differ_between_steps_and_microbatches_and_runs_repeat():
    seen = []

    def noisy(model, batch, key):
        jax.debug.callback(lambda k: seen.append(tuple(k.tolist())), jax.random.key_data(key))
        return squares(model, batch) + jax.random.normal(key, ())

    step, state = step_of(noisy, accumulation=2)
    state, first = step(state, BATCH)
    state, second = step(state, BATCH)
    jax.effects_barrier()
    assert len(set(seen)) == 4
    step, state = step_of(noisy, accumulation=2)
    assert float(step(state, BATCH)[1]["loss"]) == float(first["loss"]) != float(second["loss"])


def test_losses_may_be_a_mean_or_a_sum():
    assert as_loss_sum(jnp.float32(3)).count == 1 and as_loss_sum(2).total == 2
    assert as_loss_sum(LossSum(jnp.int32(4), 2)).total.dtype == jnp.float32
    for wrong in (jnp.ones(3), "loss", None, (jnp.ones(()), jnp.ones(()))):
        with pytest.raises(TypeError, match=r"LossSum\(total, count\)"):
            as_loss_sum(wrong)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(small_config().model, nnx.Rngs(0))


def test_language_model_loss_is_cross_entropy_of_the_labels_that_count(model):
    batch = jax.tree.map(jnp.asarray, batch_at(0, 4))
    found = language_model_loss(model, batch)
    logits = jax.nn.log_softmax(model(batch["tokens"], segment_ids=batch["segment_ids"]))
    counted = batch["labels"] != -100
    wanted = -np.take_along_axis(np.asarray(logits), np.where(counted, batch["labels"], 0)[..., None], -1)[..., 0]
    assert float(found.total) == pytest.approx(wanted[counted].sum(), rel=1e-5)
    assert float(found.count) == counted.sum() < counted.size


def test_z_loss_adds_the_square_of_the_normaliser(model):
    batch = jax.tree.map(jnp.asarray, batch_at(0, 4))
    plain, more = (language_model_loss(model, batch, train=True, z_loss=z).total for z in (0.0, 0.5))
    normaliser = jax.nn.logsumexp(model(batch["tokens"], segment_ids=batch["segment_ids"]), -1)
    assert float(more - plain) == pytest.approx(0.5 * float((normaliser**2)[batch["labels"] != -100].sum()), rel=1e-3)


def test_modules_are_told_from_what_is_none():
    with pytest.raises(TypeError, match="from_linen"):
        make_arrays(linen.Dense(3))
    with pytest.raises(TypeError, match="int"):
        make_arrays(3)


def test_a_module_keeps_its_own_initial_values():
    line = Line(nnx.Rngs(0))
    line.w.set_value(jnp.array([5.0, 6.0]))
    functional = make_arrays(line)
    params, non_params = functional.init(jax.random.key(1))
    assert params["w"].tolist() == [5, 6]
    merged = functional.merge(params, non_params)
    assert functional.split(merged)[0]["w"].tolist() == [5, 6]
