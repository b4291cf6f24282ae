"""Schedules are compared by the steps to the best loss of a constant rate."""

import pytest

from benchmarks.tuning.schedules import MODEL, SCHEDULES, compare, fewest_steps, steps_to
from jaxstack.run_config import load_config


def test_a_schedule_is_compared_at_the_rate_that_needs_the_fewest_steps():
    curves = {
        "constant": {0.1: [(10, 3.0), (20, 2.5), (30, 2.4)], 0.2: [(10, 2.9), (20, 2.6), (30, 2.6)]},
        "cosine": {0.1: [(10, 3.0), (20, 2.4), (30, 2.2)], 0.2: [(10, 2.9), (20, 2.5), (30, 2.1)]},
    }
    measured = {n: {r: {"curve": c, "milliseconds": 1.0} for r, c in runs.items()} for n, runs in curves.items()}
    constant, cosine = (compare(measured, name) for name in curves)
    assert (constant["target"], constant["steps_to_target"], constant["steps_ratio"]) == (2.4, 30, 1.0)
    assert (cosine["learning_rate"], cosine["steps_to_target"], cosine["lowest_loss"]) == (0.1, 20, 2.1)
    assert cosine["steps_ratio"] == pytest.approx(2 / 3)


def test_a_loss_that_is_not_reached_has_no_steps():
    assert steps_to([(10, 3.0), (20, 2.0)], 2.0) == 20 and steps_to([(10, 3.0)], 2.0) is None
    assert fewest_steps({0.1: [(10, 3.0)], 0.2: [(10, 2.5)]}, 2.0) == (0.2, None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_a_valid_configuration(name):
    assert load_config(None, [*MODEL, *SCHEDULES[name], "train.steps=100"]).schedule.name == name.split(",")[0]
