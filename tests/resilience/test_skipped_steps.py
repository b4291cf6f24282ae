"""Skipped steps: capped in a row, and in all over the last thousand, also across starts."""

import json

import pytest

from jaxstack.errors import JaxstackError
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.resilience.skipped_steps import WINDOW, SkippedSteps
from tests.resilience.test_spikes import settings, trainer_with

VALUES = {"loss": 9.0, "grad_norm": 1.0}
LIMITS = [3.0, 2.0]


def test_more_than_a_share_of_the_last_thousand_is_too_many():
    skips = SkippedSteps(ResilienceConfig(max_skipped_share=0.005))
    for number, step in enumerate(range(7, 7 + 5 * 20, 20), start=1):
        skips.add(step, 1, VALUES, LIMITS)
        assert skips.excess(step, 1) is None and skips.count == number
    assert skips.add(500, 1, VALUES, LIMITS).startswith("step 500 was skipped: loss 9, gradient norm 1 (at most 3 and")
    good, why, advice = skips.excess(500, 1) or pytest.fail("six of the last thousand")
    assert good == 6 and "after step 6" in advice
    assert "6 of the last 1000" in why and "max_skipped_share is 0.005" in why


def test_old_ones_are_forgotten_and_the_count_is_not():
    skips = SkippedSteps(ResilienceConfig(max_skipped_share=0.002))
    for step in (5, 5 + WINDOW, 5 + 2 * WINDOW, 6 + 2 * WINDOW):
        skips.add(step, 1, VALUES, LIMITS)
        assert skips.excess(step, 1) is None
    again = SkippedSteps(ResilienceConfig(max_skipped_share=0.002), json.loads(json.dumps(skips.to_json())))
    again.add(7 + 2 * WINDOW, 1, VALUES, LIMITS)
    assert again.count == 5 and again.excess(7 + 2 * WINDOW, 1)


def test_spikes_with_good_steps_between_them_end_the_run_too(tmp_path, capfd):
    """Two of them before a resume, which does not begin to count anew; back to the checkpoint before the first."""
    limits = {"max_skipped_share": 0.003}
    values = trainer_with(spikes := {25, 27, 29, 31, 33}, 28).fit(tmp_path, settings(**limits))
    assert values["skipped_steps"] == 2
    with pytest.raises(JaxstackError, match=r"4 of the last 1000 steps .*rolled back to checkpoint 24, "):
        trainer_with(spikes, 40).fit(tmp_path, settings(**limits))
    assert "resuming from step 28" in capfd.readouterr().out
    assert max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == 24


def test_steps_that_other_processes_skipped_are_steps_of_the_run():
    """Each counts once, whichever of them skipped it, and old ones are forgotten together."""
    records = [SkippedSteps(ResilienceConfig()) for _ in range(3)]
    turns = [([5, 9], [9, 40], []), ([], [], [40 + WINDOW]), ([2 * WINDOW, 4 * WINDOW], [3 * WINDOW], [4 * WINDOW])]
    wanted = [(3, [5, 9, 40]), (4, [40 + WINDOW]), (7, [4 * WINDOW])]
    for skipped, (count, recent) in zip(turns, wanted, strict=True):
        for record, steps in zip(records, skipped, strict=True):
            for step in steps:
                record.add(step, 1, VALUES, LIMITS)
        told = [[*record.unjoined] for record in records]
        for record in records:
            record.join(told)
            assert record.to_json() == {"count": count, "recent": recent}
