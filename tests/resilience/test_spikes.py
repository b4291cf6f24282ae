"""What counts as a spike, and what a run does with one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack import Trainer
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.errors import JaxstackError
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import make_mesh
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.resilience.skipped_steps import FEWEST, HISTORY, StepHistory
from jaxstack.run_config import TrainConfig


def history_of(values) -> StepHistory:
    history = StepHistory.empty()
    plus = jax.jit(StepHistory.plus)
    for value in values:
        history = plus(history, jnp.float32(value), jnp.float32(2 * value))
    return history


@pytest.mark.parametrize("count", [FEWEST, FEWEST + 1, HISTORY, HISTORY + 45])
def test_limits_are_those_of_the_last_steps(count):
    values = np.random.default_rng(count).normal(5, 1, count).astype(np.float32)
    found = jax.jit(StepHistory.limits)(history_of(values), 6.0)
    kept = values[-HISTORY:]
    wanted = np.median(kept) + 6 * 1.4826 * np.median(np.abs(kept - np.median(kept)))
    np.testing.assert_allclose(found, [wanted, 2 * wanted], rtol=1e-5)


def test_few_steps_judge_nothing_and_flat_ones_allow_ripples():
    assert np.isinf(history_of(range(1, FEWEST)).limits(5.0)).all()
    np.testing.assert_allclose(history_of([4.0] * 30).limits(5.0)[0], 4.0 * 1.05, rtol=1e-5)


def network(rngs):
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs))


def squares(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def trainer_with(spikes, steps):
    def data(step):
        x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1) * (1000 if step + 1 in spikes else 1)}

    train = TrainConfig(steps=steps, global_batch_size=16)
    mesh = make_mesh(devices=jax.devices()[:1])
    return Trainer(network, squares, data, optimizer=AdamW(), schedule=Constant(), mesh=mesh, train=train)


def settings(every=1, **resilience):
    return LoopSettings(
        checkpoint=CheckpointConfig(every_steps=every, keep=100),
        observe=ObserveConfig(progress=True, trackers=("jsonl",), log_every=1),
        resilience=ResilienceConfig(**{"spike_threshold": 20.0, **resilience}),
    )


def test_a_spike_leaves_no_trace(tmp_path, capfd):
    """Saved before it and after it: nothing but the two counters differs."""
    trainer = trainer_with({25}, 25)
    trainer.fit(tmp_path / "a", settings(every=24))
    found = jax.device_get(trainer.state)
    calm = trainer_with((), 24)
    calm.fit(tmp_path / "b", settings(every=24))
    wanted = jax.device_get(calm.state)
    assert (found.step, found.skipped) == (25, 1)
    for name in ("params", "non_params", "optimizer", "history"):
        chex.assert_trees_all_equal(getattr(found, name), getattr(wanted, name))
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "was skipped" in line]
    assert line.startswith("step 25 was skipped: loss ") and "resilience.spike_threshold); 1 in a row" in line


def test_without_a_threshold_spikes_are_taken(tmp_path):
    values = trainer_with({25}, 25).fit(tmp_path, settings(spike_threshold=None))
    assert values["loss"] > 1000 and "skipped_steps" not in values


def test_after_too_many_the_run_is_back_at_the_checkpoint_before_them(tmp_path, capfd):
    spikes = set(range(27, 60))
    cut = trainer_with(spikes, 28)
    cut.fit(tmp_path, settings())
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())[-2:] == [26, 28]
    capfd.readouterr()
    with pytest.raises(JaxstackError, match=r"4 steps in a row.*rolled back to checkpoint 26, .* after step 26"):
        trainer_with(spikes, 60).fit(tmp_path, settings(max_skipped_steps=4))
    assert capfd.readouterr().out.count("was skipped") == 2, "two of them before the resume"
    values = trainer_with((), 30).fit(tmp_path, settings())
    assert "resuming from step 26" in capfd.readouterr().out and values["step"] == 30


def test_a_save_waits_for_a_step_that_is_taken(tmp_path):
    trainer_with({24, 25}, 30).fit(tmp_path, settings(every=12))
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == [12, 26, 30]
