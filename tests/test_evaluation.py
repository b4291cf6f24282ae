"""Held-out evaluation does not queue more than the devices can take."""

import itertools

import jax
import pytest

from jaxstack import evaluation
from jaxstack.evaluation import Evaluator
from tests.small_runs import batch_at, make_trainer, small_config

pytestmark = pytest.mark.longer  # a few seconds each


def test_only_a_few_batches_wait_for_the_devices(monkeypatch):
    """Hundreds of programs with collectives, queued at once, hang on simulated CPU devices."""
    trainer = make_trainer(small_config("parallel.fsdp=2", "parallel.data=4"))
    batches = [batch_at(step, 8) for step in range(10)]
    evaluator = Evaluator(trainer.steps, batches, 8)
    events = []
    step = evaluator._step
    block = jax.block_until_ready

    def run(*arguments):
        events.append(1)
        return step(*arguments)

    def wait(x):
        events.append(-1)
        return block(x)

    monkeypatch.setattr(evaluator, "_step", run)
    monkeypatch.setattr(evaluation.jax, "block_until_ready", wait)
    found = evaluator.run(trainer.state.params, trainer.state.non_params)
    assert found is not None and events.count(1) == 10
    assert max(itertools.accumulate(events)) == evaluation._QUEUED + 1
    assert found["eval_items"] == sum((batch["labels"] >= 0).sum() for batch in batches)
