"""Optuna's Gaussian process over warped losses, so that bad trials do not hide the differences of good ones.

A learning rate that is too high gives a loss of a thousand. Optuna standardizes losses; beside such a one the losses of
all good trials are then equal, and the process proposes the corners of the space.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState


class WarpedGPSampler(optuna.samplers.BaseSampler):
    """Sampler that proposes what `optuna.samplers.GPSampler` proposes for the warped losses of a study's trials.

    Pruned trials count with their last loss; Optuna's own process ignores them.

    Args:
      seed: of the proposals.
      startup_trials: number of ended trials before the process proposes any; until then values are random.
    """

    def __init__(self, seed: int, startup_trials: int):
        self._seed = seed
        self._startup_trials = startup_trials
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False), include_pruned=True)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        losses = {one.number: loss for one in others if (loss := _loss(one)) is not None}
        ended = [one for one in others if one.number in losses]
        if len(ended) < self._startup_trials or not search_space:
            return {}
        process = optuna.samplers.GPSampler(seed=self._seed, n_startup_trials=self._startup_trials)
        warped = optuna.create_study(direction="minimize", sampler=process)
        warped.add_trials([_ended(one, loss) for one, loss in zip(ended, warp([*losses.values()]), strict=True)])
        warped.add_trials([one for one in others if one.state == TrialState.RUNNING])
        return warped.ask(search_space).params

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def warp(losses: Sequence[float]) -> list[float]:
    """Return losses of which those above the median are replaced, in their order, by the tail of a normal distribution.

    Losses up to the median stay. The normal distribution has the median and the lower half's mean square distance from
    it, as in Vizier's Gaussian process (Song et al. 2024, arXiv:2408.11527).
    """
    values = np.asarray(losses, np.float64)
    median = float(np.median(values))
    lower = values[values <= median]
    spread = math.sqrt(float(np.mean((lower - median) ** 2)))
    _, ranks, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts / 2  # the same rank for equal losses
    quantiles = below[ranks] / len(values)
    tail = [median + spread * NormalDist().inv_cdf(quantile) for quantile in quantiles]
    return [float(loss) if loss <= median else new for loss, new in zip(values, tail, strict=True)]


def _loss(trial: FrozenTrial) -> float | None:
    """Return the loss of a complete trial, the last one of a pruned trial, or None."""
    if trial.state == TrialState.COMPLETE:
        return trial.value
    if trial.state == TrialState.PRUNED and trial.last_step is not None:
        loss = trial.intermediate_values[trial.last_step]
        return loss if math.isfinite(loss) else None
    return None


def _ended(trial: FrozenTrial, loss: float) -> FrozenTrial:
    made = optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=loss)
    for name, value in trial.constraints.items():
        made.set_constraint(name, value)
    return made
