"""The crystalliser conserves the solute, and its runs are labelled in hindsight."""

import numpy as np
import pytest

from benchmarks.training.fields import load_example

example = load_example("process_control")


def test_crystals_take_what_the_solution_loses():
    random = np.random.default_rng(0)
    state = example.starts(16, random)
    total = state[:, 4] + 8e-9 * state[:, 3]
    number = state[:, 0]
    for jacket in (40.0, 30.0, 25.0, 15.0):
        state = example.advance(state, np.full(16, jacket))
    np.testing.assert_allclose(state[:, 4] + 8e-9 * state[:, 3], total, rtol=1e-12)
    assert np.all(state[:, 4] < total) and np.all(state[:, 0] >= number), "crystals grow, and none disappears"
    assert np.all((state[:, 5] > 15) & (state[:, 5] < 40)), "the temperature follows the jacket"


def test_runs_keep_the_limits_of_the_jacket():
    def jump(k, *_):
        return np.full(8, -100.0 if k < 20 else 200.0)

    found = example.run(jump, example.starts(8, np.random.default_rng(0)), np.zeros(8), 0.1, np.random.default_rng(1))
    assert np.min(found["jackets"]) == example.COLDEST and np.max(found["jackets"]) == example.HOTTEST
    assert np.max(np.abs(np.diff(found["jackets"]))) <= example.CHANGE + 1e-5


def test_labels_in_hindsight_repeat_the_run():
    random = np.random.default_rng(0)
    state = example.starts(8, random)
    profiles = example.random_profiles(8, random)
    first = example.run(lambda k, *_: profiles[:, k + 1], state, np.zeros(8), 0.0, random)
    rows = example.label(first)
    again = example.run(lambda k, m, jackets, g: jackets[:, k] + rows["targets"][:, k, 0], state, 0, 0.0, random)
    np.testing.assert_allclose(again["final"], first["final"], rtol=1e-6)
    assert rows["inputs"].shape == (8, example.ACTIONS, 7)
    last_error = rows["inputs"][:, -1, 4] * example.SCALES[0]
    np.testing.assert_allclose(first["measured"][:, -1, 0] + last_error, first["final"], rtol=1e-5)


@pytest.mark.trains
def test_model_predictive_control_uses_the_measurements_until_now_only():
    random = np.random.default_rng(0)
    runs = example.run(lambda k, *_: np.full(4, 40.0 - k), example.starts(4, random), np.zeros(4), 0.0, random)
    model = example.train(lambda rngs: example.Recurrent(4, 3, rngs), example.model_rows(runs), 2, 1e-3, 0)
    policy = example.predictive_policy(model, np.linspace(-3, 1, 5, dtype=np.float32))
    later = runs["measured"].copy()
    later[:, 11:] = 0
    goal = np.full(4, 150.0)
    np.testing.assert_array_equal(
        policy(10, runs["measured"], runs["jackets"], goal), policy(10, later, runs["jackets"], goal)
    )
