"""Growth of the batch: its sizes, the rows that they use, the learning rate, and an exact resume."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.checkpoint import memory_folder, shard_files
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.config.sections import BatchRamp, TrainConfig
from jaxstack.data.batch_ramp import BatchSizes, Phase
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from jaxstack.optim.optimizers import SGD
from jaxstack.optim.schedules import Constant, Linear
from jaxstack.parallel import make_mesh
from jaxstack.run_config import load_config
from jaxstack.trainer import Trainer

LENGTH = 10


def train_config(steps: int = 12, batch: int = 8, tokens: tuple[int, ...] = (60, 200), **changes) -> TrainConfig:
    ramp = BatchRamp(double_at_tokens=tokens, learning_rate=changes.pop("learning_rate", "sqrt"))
    return TrainConfig(steps=steps, global_batch_size=batch, sequence_length=LENGTH, batch_ramp=ramp, **changes)


def test_sizes_double_at_the_next_whole_batch_after_the_tokens():
    """Batches of 2; 60 tokens are 6 rows, the next multiple of 4 is 8; 200 are 20 rows, the next of 8 is 24."""
    sizes = BatchSizes(train_config())
    assert sizes.phases == (Phase(0, 0, 2), Phase(4, 8, 4), Phase(8, 24, 8))
    assert [sizes.rows(step) for step in range(10)] == [2] * 4 + [4] * 4 + [8] * 2
    assert [sizes.rows_before(step) for step in (0, 1, 4, 5, 8, 9, 12)] == [0, 2, 8, 12, 24, 32, 56]
    assert sizes.smaller(0) == [2, 4] and sizes.smaller(4) == [4] and sizes.smaller(8) == []
    assert sizes.describe() == "2 to 8" and sizes.steps_left(12) == 0 and sizes.steps_left(8) == 32 / 4


@pytest.mark.parametrize("tokens", [(1,), (77, 78), (500, 3000, 3001), (10**9,)])
def test_every_row_is_used_once_and_in_order(tokens):
    sizes = BatchSizes(train_config(steps=60, batch=16, tokens=tokens))
    next_row = 0
    for step in range(60):
        assert sizes.rows_before(step) == next_row and next_row % sizes.rows(step) == 0
        next_row += sizes.rows(step)
    streamed = [
        (rows, first + index)
        for rows, first, count in sizes.phases_from(7)
        for index in range(min(60, 60 if count is None else count))
    ]
    assert streamed[:53] == [(sizes.rows(step), sizes.rows_before(step) // sizes.rows(step)) for step in range(7, 60)]


def test_a_batch_that_cannot_be_halved_is_refused():
    with pytest.raises(ConfigError, match=r"global_batch_size \(6\) must be divisible by 4 for the 2 doublings"):
        BatchSizes(train_config(batch=6))


def test_without_a_ramp_nothing_changes():
    sizes = BatchSizes(TrainConfig(steps=5, global_batch_size=8))
    assert not sizes.grows and sizes.rows_before(5) == 40 and sizes.smaller(0) == [] and sizes.describe() == "8"
    assert int(sizes.schedule_position(3)) == 3 and sizes.steps_left(2) == 3


def test_schedules_follow_tokens():
    sizes = BatchSizes(train_config())
    clock = [float(sizes.schedule_position(step)) for step in range(13)]
    np.testing.assert_allclose(clock, [12 * sizes.rows_before(step) / 56 for step in range(13)], rtol=1e-6)


@pytest.mark.parametrize(("rule", "first"), [("sqrt", 0.5), ("linear", 0.25), ("constant", 1.0)])
def test_learning_rate_grows_with_the_batch(rule, first):
    sizes = BatchSizes(train_config(learning_rate=rule))
    factors = [float(sizes.learning_rate_factor(step)) for step in (0, 3, 4, 7, 8, 11)]
    np.testing.assert_allclose(factors, [first, first, first**0.5, first**0.5, 1, 1], rtol=1e-6)


def test_microbatches_are_never_larger_than_those_of_the_full_batch():
    sizes = BatchSizes(train_config(batch=96, tokens=(1000, 2000), gradient_accumulation=6))
    assert [sizes.microbatches(rows, 1) for rows in (24, 48, 96)] == [2, 3, 6]
    assert sizes.microbatches(24, 8) == 3  # three rows on each device: two microbatches do not divide them


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))


def squares(model, batch):
    return jnp.mean((batch["x"] @ model.w[...] - batch["y"]) ** 2)


def full_batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {"x": random.normal(size=(8, 2)).astype(np.float32), "y": random.normal(size=8).astype(np.float32)}


def make_trainer(data=full_batch, devices: int = 1, schedule=None, **changes) -> Trainer:
    return Trainer(
        Line,
        squares,
        data,
        optimizer=SGD(learning_rate=0.1, momentum=0.0, clip_norm=None),
        schedule=schedule or Constant(),
        mesh=make_mesh(devices=jax.devices()[:devices]),
        train=train_config(**changes),
    )


QUIET = LoopSettings(observe=ObserveConfig(log_every=1, trackers=("jsonl",), progress=False))


@pytest.mark.longer
def test_training_takes_the_rows_in_order_with_the_learning_rate_of_their_batch():
    """Against gradient descent in NumPy: batches of 2, 4 and 8 rows, the learning rate by their square root."""
    trainer = make_trainer()
    trainer.fit(None, QUIET)
    rows = {name: np.concatenate([full_batch(step)[name] for step in range(7)]) for name in ("x", "y")}
    w = np.array([1.0, 2.0])
    sizes = trainer.batch_sizes
    for step in range(12):
        part = slice(sizes.rows_before(step), sizes.rows_before(step + 1))
        x = rows["x"][part]
        y = rows["y"][part]
        w -= 0.1 * (len(y) / 8) ** 0.5 * 2 * x.T @ (x @ w - y) / len(y)
    np.testing.assert_allclose(trainer.state.params["w"], w, rtol=1e-4)
    assert sorted(trainer._smaller) == [2, 4]


def test_learning_rate_of_a_schedule_ends_with_the_tokens():
    trainer = make_trainer(schedule=Linear(), learning_rate="constant")
    assert trainer.learning_rate is not None
    rates = [float(trainer.learning_rate(step)) for step in (0, 4, 8, 12)]
    np.testing.assert_allclose(rates, [0.1 * (1 - rows / 56) for rows in (0, 8, 24, 56)], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_ramp_is_bit_equal(tmp_path, stop):
    def run(name: str, fail_after: int | None) -> dict[int, dict]:
        def data(step: int) -> dict[str, np.ndarray]:
            return full_batch(step)

        trainer = make_trainer(data)
        settings = LoopSettings(
            checkpoint=CheckpointConfig(every_steps=2, keep=3),
            observe=ObserveConfig(log_every=1, trackers=("jsonl",), progress=False),
        )
        if fail_after is not None:
            take = trainer.train_step

            def train_step(batch):
                if int(trainer.state.step) == fail_after:
                    raise JaxstackError("stopped by the test")
                return take(batch)

            trainer.train_step = train_step
        trainer.fit(tmp_path / name, settings)
        return trainer.state.params

    whole = run("whole", None)
    with pytest.raises(JaxstackError, match="stopped by the test"):
        run("parts", stop + 1)
    parts = run("parts", None)
    np.testing.assert_array_equal(parts["w"], whole["w"])
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text()
    assert '"step": 12' in lines and '"tokens": 56' in lines  # without sequences, items are rows


@pytest.mark.longer
def test_copies_in_memory_leave_the_devices_to_larger_batches_and_evaluations(tmp_path, monkeypatch):
    """Copies are made on the devices from the first full batch on, and none is there when an evaluation begins."""
    events: list[str] = []
    start, write = shard_files.start_copy, shard_files.write

    def start_copy(arrays, *, on_device: bool = False):
        events.append("device" if on_device else "host")
        return start(arrays, on_device=on_device)

    def slow_write(*arguments):
        time.sleep(0.05)
        events.append("written")
        return write(*arguments)

    folder = memory_folder.make_folder(tmp_path)
    monkeypatch.setenv(memory_folder.VARIABLE, str(folder))
    monkeypatch.setattr(shard_files, "has_room", lambda arrays: True)
    monkeypatch.setattr(shard_files, "start_copy", start_copy)
    monkeypatch.setattr(shard_files, "write", slow_write)
    trainer = make_trainer(eval_every_steps=10)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: events.append("evaluate"))
    checkpoint = CheckpointConfig(every_steps=100, memory_every_steps=1)
    trainer.fit(tmp_path / "run", dataclasses.replace(QUIET, checkpoint=checkpoint))
    copies = [event for event in events if event in ("device", "host")]
    assert copies == ["host"] * 8 + ["device"] * 3
    first = events.index("evaluate")
    assert events[:first].count("written") == 10 and events[first - 2 : first] == ["device", "written"]


def test_devices_share_the_batches_of_every_size():
    one = make_trainer()
    two = make_trainer(devices=2, gradient_accumulation=2)
    for trainer in (one, two):
        trainer.fit(None, QUIET)
    np.testing.assert_allclose(one.state.params["w"], two.state.params["w"], rtol=1e-5)


def test_a_batch_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"the batch of 2 sequences that train.batch_ramp begins with \(2\) must be"):
        make_trainer(devices=4).fit(None, QUIET)


def test_a_generator_is_refused():
    with pytest.raises(ConfigError, match="data that can be read again"):
        make_trainer(full_batch(step) for step in range(20)).fit(None, QUIET)


def test_configurations_that_are_refused():
    ramp = "train.batch_ramp={double_at_tokens: [1000, 3000]}"
    assert load_config(None, [ramp, "train.global_batch_size=16"]).train.batch_ramp is not None
    with pytest.raises(ConfigError, match=r"global_batch_size \(6\) must be divisible by 4 .* nearest batch: 4 or 8"):
        load_config(None, [ramp, "train.global_batch_size=6"])
    with pytest.raises(ConfigError, match="must grow from entry to entry"):
        load_config(None, ["train.batch_ramp={double_at_tokens: [1000, 1000]}"])
    with pytest.raises(ConfigError, match="does not support a pipeline"):
        load_config(None, [ramp, "train.global_batch_size=16", "parallel.pipeline=2"])
