"""The Gaussian process over warped losses: what the warp keeps, and proposals beside diverged and pruned trials."""

import math
from statistics import NormalDist

import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution

from jaxstack.tune.gaussian_process import WarpedGPSampler, warp

SPACE: dict[str, BaseDistribution] = {"x": FloatDistribution(0.0, 1.0), "y": FloatDistribution(0.0, 1.0)}


def test_losses_above_the_median_become_the_tail_of_a_normal_distribution():
    found = warp([2.0, 3.0, 2.5, 1e6, 4.0])
    spread = math.sqrt((1.0**2 + 0.5**2 + 0.0) / 3)
    assert found[:3] == [2.0, 3.0, 2.5]
    assert found[3] == pytest.approx(3.0 + spread * NormalDist().inv_cdf(0.9))
    assert found[4] == pytest.approx(3.0 + spread * NormalDist().inv_cdf(0.7))


def test_only_the_order_of_bad_losses_counts():
    assert warp([2.0, 3.0, 2.5, 5.0, 4.0]) == warp([2.0, 3.0, 2.5, 1e9, 1e3])
    tied = warp([1.0, 2.0, 3.0, 7.0, 7.0])
    assert tied[3] == tied[4] > 3.0
    assert warp([5.0, 5.0]) == [5.0, 5.0] and warp([4.0]) == [4.0]


@pytest.mark.longer
def test_a_diverged_trial_does_not_hide_the_valley():
    """A tenth of the space gives a loss of a thousand; losses of the rest differ by less than one."""
    pytest.importorskip("torch")
    study = optuna.create_study(direction="minimize")
    for number in range(18):
        study.sampler = WarpedGPSampler(number, startup_trials=6)
        trial = study.ask(SPACE)
        x, y = trial.params["x"], trial.params["y"]
        study.tell(trial, 1e3 if x > 0.9 else 2.0 + (x - 0.3) ** 2 + 0.5 * (y - 0.6) ** 2)
    assert study.best_value < 2.0 + 0.005
    proposed = [trial.params["x"] for trial in study.trials[6:]]
    assert sum(abs(x - 0.3) < 0.2 for x in proposed) > len(proposed) / 2


@pytest.mark.longer
def test_pruned_trials_count():
    """The process learns from losses of pruned trials alone: most proposals are at the best x."""
    pytest.importorskip("torch")
    study = optuna.create_study(direction="minimize")
    proposed = []
    for number in range(12):
        study.sampler = WarpedGPSampler(number, startup_trials=6)
        trial = study.ask(SPACE)
        proposed.append(trial.params["x"])
        trial.report(abs(trial.params["x"] - 0.3), 5)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert sum(abs(x - 0.3) < 0.1 for x in proposed[6:]) >= 3
