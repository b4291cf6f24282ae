"""A run goes on under another pipeline: checkpoints hold the model's own layers in their own order."""

import jax
import numpy as np
import pytest

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from tests.small_runs import make_trainer, small_config

pytestmark = pytest.mark.exhaustive

QUIET = LoopSettings(
    checkpoint=CheckpointConfig(every_steps=2),
    observe=ObserveConfig(progress=False, log_every=1, trackers=("jsonl",)),
    say=lambda text: None,
)


def trainer_until(steps: int, *overrides: str):
    shape = ("model.num_layers=5", "train.global_batch_size=8", "optimizer.eps=1e-4")
    return make_trainer(small_config(*shape, f"train.steps={steps}", "schedule.name=constant", *overrides))


@pytest.mark.parametrize(
    "first, then",
    [
        (["parallel.pipeline=2", "parallel.pipeline_schedule=interleaved"], ["parallel.pipeline=3"]),
        (["parallel.pipeline=2", "parallel.data=2"], []),
        (["parallel.fsdp=2"], ["parallel.pipeline=5"]),
    ],
    ids=["interleaved to three uneven stages", "stages to one device", "fsdp to stages"],
)
def test_a_run_goes_on_under_another_pipeline(tmp_path, first, then):
    whole = trainer_until(4)
    wanted = whole.fit(None)["loss"]
    trainer_until(2, *first).fit(tmp_path, QUIET)
    resumed = trainer_until(4, *then)
    assert resumed.fit(tmp_path, QUIET)["loss"] == pytest.approx(wanted, rel=1e-5)

    def close(a, b):
        return np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)

    jax.tree.map(close, jax.device_get(resumed.stored_state.params), jax.device_get(whole.state.params))
