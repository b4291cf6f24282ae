"""Training on workers: equal to data parallelism where it should be, resumed exactly, evaluated at the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.config.sections import BatchRamp
from jaxstack.errors import ConfigError
from jaxstack.local_sgd.diloco import DiLoCo
from jaxstack.local_sgd.local_sgd import LocalSGD
from jaxstack.local_sgd.streaming import StreamingDiLoCo
from jaxstack.loss import LossSum
from jaxstack.optim.optimizers import SGD, AdamW
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.run.build import make_trainer
from jaxstack.run.evaluate import evaluate
from jaxstack.run.load import load
from jaxstack.run.train import train
from jaxstack.run_config import TrainConfig, load_config
from jaxstack.trainer import Trainer
from jaxstack.worker_steps import Workers
from tests.small_runs import batch_at, small_config


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 12, rngs=rngs)
        self.down = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))[:, 0]


def squares(model, batch):
    return LossSum(jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.float32(len(batch["y"])))


def data(step):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def network_trainer(workers, method=None, optimizer=None, steps=8):
    devices = jax.devices()[: max(workers, 4)]
    parallel = ParallelConfig(workers=workers, data=len(devices) // workers)
    optimizer = optimizer or SGD(learning_rate=0.1, momentum=0.0, clip_norm=None)
    return Trainer(
        Network,
        squares,
        data,
        optimizer=optimizer if method is None else Workers(method, optimizer),
        schedule=Constant(),
        mesh=make_mesh(parallel, devices),
        train=TrainConfig(steps=steps, global_batch_size=16),
        eval_data=[data(1000)],
    )


def test_a_trainer_with_workers_refuses_what_their_feature_excludes():
    ramp = BatchRamp(double_at_tokens=(64,))
    with pytest.raises(ConfigError, match="workers cannot be combined with batch ramp, because the programs of"):
        Trainer(
            Network,
            squares,
            data,
            mesh=make_mesh(ParallelConfig(workers=2, data=1), jax.devices()[:2]),
            train=TrainConfig(steps=8, global_batch_size=16, batch_ramp=ramp),
            optimizer=Workers(LocalSGD()),
        )


def steps(trainer, count, start=0):
    batches = trainer.batches(start)
    try:
        return [trainer.read(trainer.train_step(next(batches)[0]))["loss"] for _ in range(count)]
    finally:
        batches.close()


def mean_params(trainer):
    return jax.device_get(trainer.stored_state.params)


def assert_close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.parametrize(
    "method", [LocalSGD(every=1), DiLoCo(every=1, outer_learning_rate=1.0, momentum=0.0)], ids=["local", "diloco"]
)
def test_one_inner_step_is_data_parallelism(method):
    ours = network_trainer(4, method)
    theirs = network_trainer(1)
    losses = steps(ours, 4), steps(theirs, 4)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_close(mean_params(ours), jax.device_get(theirs.state.params), atol=1e-6)
    described = ours.describe()["local_sgd"]
    assert described["step_bytes"] == 0
    # A ring all-reduce of float32: 2 (n - 1) / n of the parameters.
    assert described["exchange_bytes"] == [2 * 3 * 4 * ours.count_parameters() // 4]
    assert ours.wrapper.bytes_of_steps(ours, 4) == 4 * described["exchange_bytes"][0]
    assert ours.evaluate()["eval_worker_distance"] < 1e-6


@pytest.mark.exhaustive
def test_synchronous_steps_are_data_parallelism_and_exchanges_follow():
    method = DiLoCo(every=2, momentum=0.5, synchronous_steps=3)
    ours, theirs = (network_trainer(n, m, AdamW(learning_rate=0.01)) for n, m in ((4, method), (1, None)))
    np.testing.assert_allclose(steps(ours, 3), steps(theirs, 3), rtol=1e-5)
    reached = jax.device_get(theirs.state.params)
    assert_close(mean_params(ours), reached, atol=1e-6)
    assert_close(stored(ours).outer.shared["anchor"], reached, atol=1e-6)
    assert ours.evaluate()["eval_worker_distance"] < 1e-6
    steps(ours, 1, start=3)
    assert ours.evaluate()["eval_worker_distance"] < 1e-6
    steps(ours, 1, start=4)
    assert ours.evaluate()["eval_worker_distance"] > 1e-4
    parameters = 2 * 3 * 4 * ours.count_parameters() // 4
    described = ours.describe()["local_sgd"]
    assert described["step_bytes"] == 0 and described["exchange_bytes"] == [parameters]
    # Beside the gradients, the loss and the number of items.
    assert described["synchronous_bytes"] == parameters + 2 * 2 * 3
    assert ours.wrapper.bytes_of_steps(ours, 6) == 3 * described["synchronous_bytes"] + 2 * parameters


def stored(trainer):
    return jax.device_get(trainer.stored_state)._replace(key=None)


@pytest.mark.parametrize(
    "method",
    [
        DiLoCo(every=2, compression="powersgd", rank=1),
        pytest.param(StreamingDiLoCo(every=3, fragments=2, delay=2), marks=pytest.mark.exhaustive),
    ],
    ids=["powersgd", "streaming"],
)
def test_a_run_goes_on_exactly_from_what_is_stored(method):
    whole, resumed = (network_trainer(2, method, AdamW(learning_rate=0.01)) for _ in range(2))
    steps(whole, 3)
    places = jax.tree.map(lambda x: x.sharding, resumed.abstract_stored_state)
    resumed.stored_state = jax.device_put(jax.device_get(whole.stored_state), places)
    assert steps(whole, 4, start=3) == steps(resumed, 4, start=3)
    jax.tree.map(np.testing.assert_array_equal, stored(resumed), stored(whole))
    apart = stored(whole).outer.own["params"]
    assert any(np.any(x[0] != x[1]) for x in jax.tree.leaves(apart))


def test_streaming_merges_what_it_sent_after_the_delay():
    trainer = network_trainer(2, StreamingDiLoCo(every=4, fragments=1, delay=1, mixing=0.0, momentum=0.0), steps=5)
    steps(trainer, 4)
    before = stored(trainer)
    steps(trainer, 1, start=4)
    after = stored(trainer)
    assert_close(after.outer.own["params"]["up"]["kernel"][0], after.outer.shared["anchor"]["up"]["kernel"])
    expected = jax.tree.map(
        lambda anchor, mean: anchor + 0.7 * (mean - anchor), before.outer.shared["anchor"], before.params
    )
    assert_close(after.outer.shared["anchor"], expected, atol=1e-6)


def rows(step):
    batch = batch_at(step, 8)
    return {"tokens": batch["tokens"], "labels": np.roll(batch["tokens"], -1, 1)}


def language_trainer(*overrides, devices=4):
    config = small_config("train.global_batch_size=8", "optimizer.name=sgd", "optimizer.clip_norm=null", *overrides)
    return make_trainer(config, rows, jax.devices()[:devices])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["fsdp: 2", "data: 2, zero: 1", "tensor: 2", "context: 2"])
def test_any_layout_inside_of_a_worker(layout):
    ours = language_trainer(f"parallel={{workers: 2, {layout}}}", "local_sgd={name: local_sgd, every: 1}")
    theirs = language_trainer(devices=1)
    np.testing.assert_allclose(steps(ours, 3), steps(theirs, 3), rtol=2e-4)
    ran = ours.describe()
    assert ran["local_sgd"]["step_bytes"] == 0
    assert ran["local_sgd"]["exchange_bytes"][0] > 0


@pytest.mark.exhaustive
def test_a_trained_run_is_the_mean_of_its_workers(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the workers drift apart and meet again. " * 200)
    overrides = [
        "model={num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 16}", f"run.dir={tmp_path}",
        "run.name=run", f"data.sources=[{{path: {text}}}]", "data.tokenizer.name=byte", f"data.cache_dir={tmp_path}",
        "train={steps: 3, global_batch_size: 8, sequence_length: 16}", "parallel={workers: 2, data: 4}",
        "observe={trackers: [jsonl], progress: false}", "local_sgd={name: diloco, every: 2}",
    ]  # fmt: skip
    trained = train(load_config(None, overrides))
    assert trained.metrics["eval_worker_distance"] > 0
    evaluated = evaluate(trained.directory).text
    assert evaluated is not None
    assert evaluated.loss == pytest.approx(trained.metrics["eval_loss"], rel=1e-5)
    run = load(trained.directory)
    assert len(run.generate(["the"], max_tokens=2)[0].text) >= 0
    with pytest.raises(ConfigError, match="does not fit this run"):
        train(load_config(None, [*overrides, "parallel={workers: 4, data: 2}", "train.steps=4"]))
