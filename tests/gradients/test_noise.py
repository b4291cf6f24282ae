"""The gradient noise scale of problems whose covariance is known, and on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.gradients.noise import Group, estimate_noise
from jaxstack.loss import LossSum, language_model_loss
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.noise_scale import NoiseScale
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.state import init_state
from jaxstack.step import StepFunctions, StepSettings
from tests.small_runs import batch_at, make_trainer, small_config

WIDTH = 1000
SIGMA = 0.1


class Weight(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros(WIDTH))


def linear(model, batch):
    """A loss whose gradient for each row is the row itself."""
    return LossSum(jnp.sum(batch["x"] @ model.w[...]), jnp.float32(len(batch["x"])))


def noise_scale(devices: int, steps: int = 300) -> dict[str, float]:
    """The running means after steps of 64 rows, mean of unit length, covariance SIGMA² times the identity."""
    rules = make_rules(make_mesh(devices=jax.devices()[:devices]))
    module = ModuleArrays(Weight)
    functions = StepFunctions(module, linear, optax.sgd(0.0), None, rules, accumulation=8 // devices)
    functions = functions.with_settings(StepSettings(noise_scale=True))
    step = jax.jit(functions.train_step)
    state = init_state(module, optax.sgd(0.0), jax.random.key(0))
    random = np.random.default_rng(0)
    mean = np.full(WIDTH, WIDTH**-0.5)
    scale = NoiseScale()
    for _ in range(steps):
        x = (mean + SIGMA * random.standard_normal((64, WIDTH), np.float32)).astype(np.float32)
        state, metrics = step(state, {"x": x})
        found = scale.update({name: float(value) for name, value in metrics.items()})
    return found


@pytest.mark.longer
@pytest.mark.quick
def test_a_known_covariance_is_found_within_one_percent():
    """The trace of the covariance over the squared mean: 1000 x 0.01 / 1 = 10 rows."""
    found = noise_scale(devices=1)
    assert found["noise_scale"] == pytest.approx(10.0, rel=0.01)
    assert found["gradient_noise"] == pytest.approx(10.0, rel=0.01)
    assert found["gradient_signal"] == pytest.approx(1.0, rel=0.01)


def test_replicas_of_a_known_covariance():
    assert noise_scale(devices=2)["noise_scale"] == pytest.approx(10.0, rel=0.01)


def test_microbatches_of_unequal_size():
    """Exact means over all microbatches: |g|² = |G|² + S / b for each of them."""
    counts = np.array([10.0, 30.0, 0.0, 60.0])
    signal = 2.0
    noise = 5.0
    squares = counts**2 * (signal + noise / np.maximum(counts, 1.0))
    whole = 100.0**2 * (signal + noise / 100.0)
    group = Group()
    found = estimate_noise({group: jnp.asarray(squares)}, jnp.asarray(counts), {group: jnp.float32(whole)}, 100.0)
    assert float(found["gradient_signal"]) == pytest.approx(signal, rel=1e-4)
    assert float(found["gradient_noise"]) == pytest.approx(noise, rel=1e-4)


def small_batches(layout: str, rows: int) -> tuple[list, list]:
    """Rows of the small batches of sharded and of replicated parameters, with two microbatches on two devices."""
    half = rows // 2
    quarter = rows // 4
    by_device = [
        list(range(device * half + micro * quarter, device * half + (micro + 1) * quarter))
        for micro in range(2)
        for device in range(2)
    ]
    together = [by_device[0] + by_device[1], by_device[2] + by_device[3]]
    if layout == "data":
        return by_device, by_device
    return together, together if layout == "zero" else by_device


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("data", ("parallel.data=2",)),
        pytest.param("fsdp", ("parallel.fsdp=2",), marks=pytest.mark.exhaustive),
        ("zero", ("parallel.data=2", "parallel.zero=2")),
        pytest.param("data", ("parallel.data=2", "parallel.zero=1"), marks=pytest.mark.exhaustive),
    ],
    ids=["data", "fsdp", "zero2", "zero1"],
)
def test_sharded_gradients_have_the_small_batches_that_they_are_summed_over(layout, overrides):
    config = small_config(*overrides, "train.global_batch_size=8", "train.gradient_accumulation=2")
    trainer = make_trainer(config)
    trainer.set_step(StepSettings(noise_scale=True))
    batch = batch_at(0, 8)
    specs = jax.tree.map(lambda x: any(part is not None for part in x.spec), trainer.shardings.params)
    plain = make_trainer(small_config("train.global_batch_size=8"))
    plain.state = jax.tree.map(jnp.array, plain.state)

    @functools.partial(jax.grad, has_aux=True)
    def gradients_of(params, part):
        found = language_model_loss(plain.module.merge(params, plain.state.non_params), part)
        return found.total, found.count

    def gradients(rows: list[int]) -> tuple[list[np.ndarray], float]:
        part = {name: jnp.asarray(x[np.array(rows)]) for name, x in batch.items()}
        grads, count = jax.jit(gradients_of)(plain.state.params, part)
        return [np.asarray(g, np.float64) / float(count) for g in jax.tree.leaves(grads)], float(count)

    expected = {"gradient_signal": 0.0, "gradient_noise": 0.0}
    whole, count = gradients(list(range(8)))
    sets = {sharded: [gradients(rows) for rows in small_batches(layout, 8)[not sharded]] for sharded in (True, False)}
    for index, sharded in enumerate(jax.tree.leaves(specs)):
        small = np.mean([np.sum(g[index] ** 2) for g, _ in sets[sharded]])
        inverse = np.mean([1 / number for _, number in sets[sharded]])
        large = np.sum(whole[index] ** 2)
        noise = (small - large) / (inverse - 1 / count)
        expected["gradient_noise"] += noise
        expected["gradient_signal"] += large - noise / count
    metrics = trainer.train_step(trainer.put(batch))
    jax.block_until_ready(trainer.state)  # its collectives must not run beside the next test's
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=2e-3)
