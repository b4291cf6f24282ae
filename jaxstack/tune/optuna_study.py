"""A hyperparameter study stored by Optuna: proposes trials' values, records their results, and prunes bad trials.

Only this module and `gaussian_process.py` know how Optuna represents a search space, constraints and failed trials.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from jaxstack.data.fingerprint import fingerprint_difference
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.tune.gaussian_process import WarpedGPSampler
from jaxstack.tune.space import Dimension, Range, SearchSpace, StudyConfig

_CONSTRAINTS = ("memory", "failure")
"""Constraints of every ended trial, as Optuna's Gaussian process needs the same ones from all of them. A trial is
feasible if none is positive."""
_WORST = 20.0
"""Value of an infeasible trial while no trial has a loss: nats per token, above those of a random model."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a trial: how it ended (complete, pruned, failed, ...), and its metric's value.

    Attributes:
      state: "complete", "pruned", "memory" (it does not fit), "configuration" (its values do not fit together) or
        "failed".
      value: the study's metric; None unless complete.
      memory_excess: memory needed / memory available - 1; None if unknown.
      reason: message of a trial that failed or does not fit.
    """

    state: str
    value: float | None = None
    memory_excess: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """Data of a trial for reports: its number, state, hyperparameter values and losses.

    Attributes:
      number: number of the trial, from 0.
      state: as in `Outcome`, or "running".
      values: `section.key` -> value; without keys that the trial's configuration does not have.
      value: the study's metric, or None.
      curve: (step, held-out loss) pairs, in order.
      reason: why it has no value.
      seconds: duration, or None while it runs.
    """

    number: int
    state: str
    values: dict[str, Any]
    value: float | None
    curve: tuple[tuple[int, float], ...]
    reason: str
    seconds: float | None


class OptunaStudy:
    """Hyperparameter study in an Optuna database or journal file, which several processes and hosts may share.

    Args:
      config: the study.
      space: its search space.
      directory: directory of the study, for the default storage.
      identity: what makes trials comparable, as plain data; a stored study with another one is refused.
      steps: number of steps of a trial, for the pruners.
      base_first: let the first trial of a new study be the configuration as it is, if that is in the space.

    Raises:
      ConfigError: the storage cannot be opened, or the stored study is of another configuration.
    """

    def __init__(
        self,
        config: StudyConfig,
        space: SearchSpace,
        directory: Path,
        identity: Mapping[str, Any],
        steps: int,
        *,
        base_first: bool = True,
    ):
        optuna.logging.set_verbosity(logging.ERROR)
        self.config = config
        self.space = space
        self._distributions = {key: to_distribution(one) for key, one in space.dimensions.items()}
        self._used: dict[int, dict[str, Any]] = {}
        place = config.storage or str(directory / "study.journal")
        storage = _open_storage(place)
        with _storage_errors(place):
            self._study = optuna.create_study(
                storage=storage,
                study_name=config.name,
                direction="minimize",
                load_if_exists=True,
                pruner=make_pruner(config, steps),
            )
            self._check_identity(json.loads(json.dumps(identity)), base_first)

    def _check_identity(self, identity: Mapping[str, Any], base_first: bool) -> None:
        stored = self._study.user_attrs.get("identity")
        if stored is None:
            self._study.set_user_attr("identity", identity)
            base = self.space.base_values() if base_first else None
            if base is not None:
                self._study.enqueue_trial({key: _encode(self.space.dimensions[key], v) for key, v in base.items()})
        elif difference := fingerprint_difference(stored, identity):
            raise ConfigError(
                f"study {self.config.name!r} was made with another configuration: {difference}. Set it back, or choose "
                "another name in the study file."
            )

    def started(self) -> int:
        """Return the number of trials started so far, on all hosts."""
        return sum(trial.state != TrialState.WAITING for trial in self._trials())

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Start a trial: return its number and the hyperparameter values that it should try."""
        number = self.started()
        self._study.sampler = make_sampler(self.config, number)
        with _quiet():
            trial = self._study.ask(self._distributions)
        return trial.number, self.values(trial.number)

    def values(self, number: int) -> dict[str, Any]:
        """Return the hyperparameter values of a trial."""
        params = self._frozen_trial(number).params
        return {key: _decode(self.space.dimensions[key], value) for key, value in params.items()}

    def _used_values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial without those that its optimizer, for example, does not have."""
        if number not in self._used:
            self._used[number] = self.space.used(self.values(number))
        return self._used[number]

    def running(self) -> list[int]:
        """Return the ids of the trials that are running, or were when their process was killed."""
        return [trial.number for trial in self._trials() if trial.state == TrialState.RUNNING]

    def report(self, number: int, step: int, loss: float) -> bool:
        """Record the held-out loss of a running trial; return True if the pruner decides to stop it."""
        trial = self._trial(number)
        if step not in self._frozen_trial(number).intermediate_values:
            trial.report(loss, step)
        return not math.isfinite(loss) or trial.should_prune()

    def tell(self, number: int, outcome: Outcome) -> None:
        """Record how a trial ended; failed trials get the worst loss so far, so the sampler avoids their values."""
        trial = self._trial(number)
        fits = outcome.state != "memory"
        excess = outcome.memory_excess
        memory = min(-1.0 if excess is None else excess, 0.0) if fits else max(excess or 0.0, 0.05)
        failed = outcome.state in ("configuration", "failed")
        for name, value in zip(_CONSTRAINTS, (memory, 1.0 if failed else -1.0), strict=True):
            trial.set_constraint(name, value)
        trial.set_user_attr("outcome", outcome.state)
        trial.set_user_attr("reason", outcome.reason)
        if outcome.state == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.value if outcome.state == "complete" else self._worst())

    def _worst(self) -> float:
        known = [value for trial in self._trials() for value in (trial.value, *trial.intermediate_values.values())]
        return max((value for value in known if value is not None and math.isfinite(value)), default=_WORST)

    def records(self) -> list[TrialRecord]:
        """Return all trials started so far, in the order of their start."""
        return [self._record(trial) for trial in self._trials() if trial.state != TrialState.WAITING]

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        state = "running" if trial.state == TrialState.RUNNING else str(trial.user_attrs.get("outcome", "failed"))
        return TrialRecord(
            number=trial.number,
            state=state,
            values=self._used_values(trial.number),
            value=trial.value if state == "complete" else None,
            curve=tuple(sorted(trial.intermediate_values.items())),
            reason=str(trial.user_attrs.get("reason", "")),
            seconds=trial.duration.total_seconds() if trial.duration is not None else None,
        )

    def importance(self) -> dict[str, float]:
        """Return {hyperparameter: fraction (0 to 1) of the loss's variation that it explains}, by PED-ANOVA.

        The result is empty if there are few trials, or their losses are equal.
        """
        feasible = [t for t in self._trials() if t.state == TrialState.COMPLETE and max(t.constraints.values()) <= 0]
        if len(feasible) < 4 or len(self._distributions) < 2:
            return {}
        shown = optuna.create_study(direction="minimize")
        shown.add_trials(feasible)
        with _quiet():
            try:
                found = optuna.importance.get_param_importances(shown)
            except (RuntimeError, ValueError):  # all values are equal
                return {}
        return {key: float(value) for key, value in found.items() if math.isfinite(value)}

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _frozen_trial(self, number: int) -> FrozenTrial:
        """Return the trial with this number as Optuna stores it, a `FrozenTrial`."""
        return next(trial for trial in self._trials() if trial.number == number)

    def _trial(self, number: int) -> optuna.Trial:
        """Return Optuna's handle of a trial, even if another process started it."""
        return optuna.Trial(self._study, self._frozen_trial(number)._trial_id)


def best_of(records: list[TrialRecord]) -> TrialRecord | None:
    """Return the complete trial with the smallest metric; None if no trial is complete."""
    complete = [record for record in records if record.value is not None and math.isfinite(record.value)]
    return min(complete, key=lambda record: (record.value, record.number), default=None)


def make_sampler(config: StudyConfig, number: int) -> optuna.samplers.BaseSampler:
    """Return the Optuna sampler that proposes the hyperparameter values of trial `number`.

    Its seed depends on the study's seed and the number alone: a resumed study goes on as if it had not stopped, and
    workers that start at the same time do not propose the same values.
    """
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if config.sampler == "gp":
        return WarpedGPSampler(seed, config.random_trials)
    return optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=config.random_trials, multivariate=True, constant_liar=True
    )


def make_pruner(config: StudyConfig, steps: int) -> optuna.pruners.BasePruner:
    """Return the Optuna pruner that `config` names, set up for trials of `steps` training steps.

    The median rule stops no trial in the first fifth of its steps.
    """
    if config.pruner == "median":
        return optuna.pruners.MedianPruner(config.pruner_startup_trials, n_warmup_steps=steps // 5)
    if config.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=max(1, steps // 9), max_resource=steps)
    return optuna.pruners.NopPruner()


def to_distribution(dimension: Dimension) -> BaseDistribution:
    """Return the Optuna distribution for one hyperparameter's range or list of choices."""
    if not isinstance(dimension, Range):
        return CategoricalDistribution([_encode(dimension, value) for value in dimension.values])
    if dimension.whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _encode(dimension: Dimension, value: Any) -> Any:
    """Encode a hyperparameter value for Optuna: choices as JSON text, since they may be lists; numbers unchanged."""
    return value if isinstance(dimension, Range) else json.dumps(value)


def _decode(dimension: Dimension, value: Any) -> Any:
    return value if isinstance(dimension, Range) else json.loads(value)


def check_packages(config: StudyConfig) -> None:
    """Raise ConfigError if a package that the sampler needs is missing, before any trial has run."""
    missing = [name for name in ("torch", "scipy") if importlib.util.find_spec(name) is None]
    if config.sampler == "gp" and missing:
        raise ConfigError(
            f"sampler: gp needs {' and '.join(missing)}, not installed here: pip install torch scipy, or choose "
            "sampler: tpe."
        )


def _open_storage(place: str) -> optuna.storages.BaseStorage:
    with _storage_errors(place):
        if "://" in place:
            return optuna.storages.RDBStorage(place)
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(JournalFileBackend(place))


@contextlib.contextmanager
def _storage_errors(place: str) -> Iterator[None]:
    """Context manager that re-raises errors of the study's database or journal file as ConfigError."""
    try:
        with _quiet():
            yield
    except JaxstackError:
        raise
    except Exception as error:
        if "://" in place:
            raise ConfigError(f"cannot open the study's storage {place}: {str(error).splitlines()[0]}") from None
        if isinstance(error, OSError):
            raise ConfigError(f"cannot open the study's storage {place}: {error.strerror or error}.") from None
        if isinstance(error, ValueError | KeyError):
            raise ConfigError(
                f"the study's storage {place} is damaged or no journal of Optuna; move it away to begin the study anew."
            ) from None
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
