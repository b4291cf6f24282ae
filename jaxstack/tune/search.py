"""Runs the trials of a hyperparameter study as processes on this host, stops bad ones, and resumes interrupted ones."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxstack.config.loader import dump_yaml, overridden_keys
from jaxstack.distributed.cluster import count_gpus
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import FileLock, LockHeld, exclusive, write_file
from jaxstack.launch.child import Child, Limits, find_stuck, name_limit
from jaxstack.observe.report.series import read_metrics
from jaxstack.resilience.exit_on_signal import signal_name
from jaxstack.resilience.stop_request import Interrupted, StopRequest
from jaxstack.run_config import RunConfig, config_from_tree
from jaxstack.tune.optuna_study import OptunaStudy, Outcome, TrialRecord, best_of, check_packages
from jaxstack.tune.report import write_report
from jaxstack.tune.space import StudyConfig, load_study, read_space
from jaxstack.tune.trial import LOG, OUTCOME

_POLL_SECONDS = 0.2
_PAUSE_SECONDS = 60.0
"""If a look at the trials is this late, the whole study was suspended, and their silence means nothing."""
_SAVE_SECONDS = 60.0
"""Time for the trials to save after a stop signal."""
_FAILURES_IN_A_ROW = 3
"""Number of first trials that may all fail before the study gives up."""
_EVALUATIONS = 10
"""Held-out evaluations of a trial that the configuration leaves without any."""
_OTHER_RUNS = ("SLURM_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
"""Beginnings of variables by which a trial would take itself for a process of a larger run."""


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """Result of a hyperparameter study: its directory, the best trial, and the records of all trials.

    Attributes:
      directory: directory of the study.
      best: the trial with the smallest held-out loss; None if no trial was complete.
      records: all trials.
    """

    directory: Path
    best: TrialRecord | None
    records: Sequence[TrialRecord]


def run_study(
    config: str | Path, study: str | Path, overrides: Sequence[str] = (), *, report: Callable[[str], None] = print
) -> StudyResult:
    """Run a hyperparameter study: search for the configuration values with the smallest loss.

    Resumes a study that was stopped. Several hosts may run one study if they share its storage.

    Args:
      config: YAML file of the configuration.
      study: YAML file of the study, see `StudyConfig`.
      overrides: `section.key=value` strings, laid over the configuration; `run.name` among them names the study.
      report: called with each line of progress.

    Raises:
      ConfigError: the study or its space is wrong, or the directory holds a study of another configuration.
      JaxstackError: every one of the first trials failed.
      Interrupted: a signal stopped the study; the same call goes on.
    """
    settings = load_study(study)
    space = read_space(settings.space, config, overrides, str(study))
    base = space.configuration({})
    if "run.name" in overridden_keys(overrides):
        settings = settings.model_copy(update={"name": base.run.name})
    directory = Path(base.run.dir) / settings.name
    check_packages(settings)
    try:
        with exclusive(directory / ".lock", on_wait=lambda: None):
            stored = OptunaStudy(settings, space, directory, study_identity(base, settings), base.train.steps)
        search = Search(stored, directory, report)
        with StopRequest() as stop, contextlib.closing(search):
            search.run(stop)
    except OSError as error:
        raise cannot_write(error.filename or directory, error) from None
    records = stored.records()
    return StudyResult(directory, best_of(records), records)


def study_identity(base: RunConfig, settings: StudyConfig) -> dict[str, Any]:
    """Return the search space, metric and fixed settings, as plain data, that must stay the same to resume a study."""
    tree = base.model_dump(mode="json", by_alias=True)
    chosen = {name: tree[name] for name in ("model", "train", "optimizer", "schedule", "precision", "adapters")}
    data = {key: value for key, value in tree["data"].items() if key not in ("cache_dir", "read_ahead")}
    run = {"seed": base.run.seed, "init_from": base.run.init_from}
    found: dict[str, Any] = {"run": run, "data": data, **chosen}
    for key in settings.space:  # these differ from trial to trial
        *sections, last = key.split(".")
        functools.reduce(lambda tree, name: tree.get(name) or {}, sections, found).pop(last, None)
    return {"space": settings.space, "metric": settings.metric, "configuration": found}


@dataclasses.dataclass
class _Running:
    """A trial whose process is running on this host."""

    number: int
    directory: Path
    child: Child
    lock: FileLock
    slot: int
    config: RunConfig
    values: Mapping[str, Any]
    seen: int = 0
    """Size of the metrics file that was read last."""
    pruned_at: int | None = None


class Search:
    """Starts, watches, prunes and resumes the processes of a hyperparameter study's trials on this host.

    Args:
      study: the study.
      directory: its directory, which exists.
      say: called with each line of progress.
    """

    def __init__(self, study: OptunaStudy, directory: Path, say: Callable[[str], None]):
        self.study = study
        self.directory = directory
        self._say = say
        self._running: list[_Running] = []
        self._workers = study.config.workers
        self._gpus = self._split_gpus()
        self._looked = self._awake = time.monotonic()

    def _split_gpus(self) -> list[str] | None:
        """Divide the host's GPUs among workers: return CUDA_VISIBLE_DEVICES of each; None without GPUs."""
        count = count_gpus()
        workers = self._workers
        if count == 0:
            return None
        if count % workers:
            raise ConfigError(f"workers ({workers}) must divide the {count} GPUs of this host, which they share.")
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = chosen.split(",") if chosen else [str(index) for index in range(count)]
        each = count // workers
        return [",".join(names[i * each : (i + 1) * each]) for i in range(workers)]

    def run(self, stop: StopRequest) -> None:
        """Start and watch trials until the study has as many as configured, or a signal arrives."""
        self._announce()
        while True:
            before, self._looked = self._looked, time.monotonic()
            if self._looked - before > _PAUSE_SECONDS:
                self._awake = self._looked
            for trial in list(self._running):
                self._watch(trial)
            if stop.reached():
                raise Interrupted(
                    stop.signum or 0,
                    f"stopped by {signal_name(stop.signum or 0)}; the same command goes on with the study",
                )
            while len(self._running) < self._workers and self._start_next():
                pass
            if not self._running:
                return
            time.sleep(_POLL_SECONDS)

    def _announce(self) -> None:
        done = self.study.started()
        total = self.study.config.trials
        count = f"{total} trials" if not done else f"{done} of {total} trials started before"
        self._say(f"study {self.study.config.name} in {self.directory}: {count}")
        self._update_report()

    def close(self) -> None:
        """Ask running trials to save a checkpoint and exit, and wait for them; they can be resumed later."""
        deadline = time.monotonic() + _SAVE_SECONDS
        for trial in self._running:
            trial.child.send(signal.SIGTERM)
        for trial in self._running:
            trial.child.wait(deadline - time.monotonic())
            _kill(trial.child)
            trial.lock.release()
        self._running.clear()

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_next(self) -> bool:
        """Resume an interrupted trial or start a new one; return False if none is left to start."""
        with exclusive(self.directory / ".lock", on_wait=lambda: None):
            for number in self.study.running():
                if any(trial.number == number for trial in self._running) or not self._directory_of(number).is_dir():
                    continue
                lock = self._try_lock(number)
                if lock is not None:
                    self._say(f"trial {number}: going on")
                    return self._start(number, self.study.values(number), lock)
            if self.study.started() >= self.study.config.trials:
                return False
            number, values = self.study.ask()
            self._directory_of(number).mkdir(parents=True, exist_ok=True)
            lock = self._try_lock(number)
        if lock is None:
            raise JaxstackError(
                f"{self._directory_of(number)} is locked by another process: give each study its own run.dir"
            )
        return self._start(number, values, lock)

    def _directory_of(self, number: int) -> Path:
        return self.directory / "trials" / f"{number:04d}"

    def _try_lock(self, number: int) -> FileLock | None:
        lock = FileLock(self._directory_of(number) / ".trial")
        try:
            lock.acquire()
        except LockHeld:
            lock.release()
            return None
        return lock

    def _start(self, number: int, values: Mapping[str, Any], lock: FileLock) -> bool:
        directory = self._directory_of(number)
        try:
            config = self._trial_config(number, values)
        except ConfigError as error:
            lock.release()
            self._tell(number, values, Outcome("configuration", reason=str(error)))
            return True
        write_file(directory / "config.yaml", dump_yaml(config).encode(), durable=False)
        (directory / OUTCOME).unlink(missing_ok=True)
        slot = min(set(range(self._workers)) - {trial.slot for trial in self._running})
        child = Child(number, trial_command(directory), self._environment(slot), directory)
        self._running.append(_Running(number, directory, child, lock, slot, config, values))
        return True

    def _trial_config(self, number: int, values: Mapping[str, Any]) -> RunConfig:
        """Return the run configuration of a trial, with its hyperparameter values and directory filled in.

        If the study has a pruner, the trial has held-out evaluations even if the base configuration has none.
        """
        tree = self.study.space.configuration(values).model_dump(mode="json", by_alias=True)
        tree["run"] |= {"dir": str(self.directory / "trials"), "name": f"{number:04d}"}
        tree["observe"]["trackers"] = ["jsonl"]
        tree["checkpoint"]["keep"] = 1
        if self.study.config.pruner != "none" and tree["train"]["eval_every_steps"] is None:
            tree["train"]["eval_every_steps"] = max(1, tree["train"]["steps"] // _EVALUATIONS)
        return config_from_tree(tree, f"trial {number}")

    def _environment(self, slot: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHER_RUNS)}
        return kept if self._gpus is None else {**kept, "CUDA_VISIBLE_DEVICES": self._gpus[slot]}

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self, trial: _Running) -> None:
        """Report a running trial's new held-out losses to the pruner; if it is pruned or ended, record the outcome."""
        code = trial.child.poll()
        self._read_curve(trial)
        if trial.pruned_at is not None:
            _kill(trial.child)  # without saving: its checkpoints are deleted
            outcome = Outcome("pruned", reason=f"stopped after step {trial.pruned_at}")
        elif code is None:
            reason = self._describe_silence(trial)
            if reason is None:
                return
            _kill(trial.child)
            outcome = Outcome("failed", reason=reason)
        else:
            outcome = self._outcome(trial, code)
        self._running.remove(trial)
        self._tell(trial.number, trial.values, outcome)
        trial.lock.release()

    def _describe_silence(self, trial: _Running) -> str | None:
        """Return for how long a trial's process is stuck, after its stacks are told; None if it is not stuck."""
        record = trial.child.record()
        limits = Limits()
        stopped = {trial.number: trial.child.is_stopped}
        now = time.monotonic()
        if find_stuck({trial.number: record}, limits, now, self._awake, stopped) is None:
            return None
        limit = limits.timeout_of(record, trial.child.is_stopped())
        self._say(f"trial {trial.number} is stuck; its stacks:\n{trial.child.stacks()}")
        raised = "; if it only needs longer, raise resilience.step_seconds" if "step" in name_limit(record) else ""
        silence = f"it gave no sign of life for {now - record.at:.0f} s in phase {record.phase!r} at step {record.step}"
        return f"{silence} (limit {limit:.0f} s{raised})"

    def _read_curve(self, trial: _Running) -> None:
        """Read the held-out losses that a trial's metrics file gained since last time; report them to the pruner."""
        path = trial.directory / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == trial.seen:
            return
        trial.seen = size
        series = read_metrics(path).get(self.study.config.metric)
        last = trial.config.train.steps
        for step, loss in zip(series.steps, series.values, strict=True) if series is not None else ():
            if self.study.report(trial.number, int(step), float(loss)) and step < last:
                trial.pruned_at = int(step)
                return

    def _outcome(self, trial: _Running, code: int) -> Outcome:
        """Return how a trial ended, given its outcome file and its process's exit code."""
        try:
            found = json.loads((trial.directory / OUTCOME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
            killed = code == -9  # killed by the Linux kernel: the host ran out of memory
            return Outcome("memory" if killed else "failed", reason=f"its process {how}; see {trial.directory / LOG}")
        excess = found.get("memory_excess")
        reason = found.get("reason", "")
        if found["state"] != "complete":
            return Outcome(found["state"], None, excess, reason)
        metrics = found["metrics"]
        metric = self.study.config.metric
        value = metrics.get(f"final_{metric}", metrics.get(metric))
        if not isinstance(value, int | float):
            return Outcome("failed", reason=f"the run has no {metric}: it has no held-out text")
        if not math.isfinite(value):
            return Outcome("failed", reason=f"its {metric} is not finite")
        return Outcome("complete", float(value), excess)

    # --- recording ---------------------------------------------------------------------------------------------------

    def _tell(self, number: int, values: Mapping[str, Any], outcome: Outcome) -> None:
        before = best_of(self.study.records())
        self.study.tell(number, outcome)
        records = self.study.records()
        best = best_of(records)
        shown = outcome.state if outcome.value is None else f"{self.study.config.metric} {outcome.value:.4f}"
        reason = f": {outcome.reason}" if outcome.reason else ""
        mark = ", the best so far" if best is not None and best.number == number else ""
        self._say(f"trial {number}: {shown}{reason} ({describe_values(self.study.space.used(values))}){mark}")
        self._drop_checkpoints(number, before, best)
        self._update_report()
        ended = [record for record in records if record.state != "running"]  # on this host and others
        failed = [record for record in ended if record.state in ("failed", "configuration")]
        if best is None and len(failed) >= _FAILURES_IN_A_ROW and len(failed) == len(ended):
            raise JaxstackError(
                f"all of the first {len(failed)} trials failed; the last one: {failed[-1].reason}. See "
                f"{self._directory_of(failed[-1].number) / LOG}"
            )

    def _drop_checkpoints(self, ended: int, before: TrialRecord | None, best: TrialRecord | None) -> None:
        """Delete the checkpoints of the trial that just ended and of the former best one, unless they are to be kept.

        The study's `keep_checkpoints` says which are kept.
        """
        keep = self.study.config.keep_checkpoints
        doomed = {ended} | ({before.number} if before is not None else set())
        if keep == "best" and best is not None:
            doomed.discard(best.number)
        for number in () if keep == "all" else doomed:
            shutil.rmtree(self._directory_of(number) / "checkpoints", ignore_errors=True)

    def _update_report(self) -> None:
        """Write the study's report.html, and best.yaml if a trial is complete."""
        records = self.study.records()
        best = best_of(records)
        text = ""
        if best is not None:
            tree = self.study.space.configuration(best.values).model_dump(mode="json", by_alias=True)
            tree["run"] |= {"name": f"{self.study.config.name}-best"}
            text = dump_yaml(config_from_tree(tree, "the best trial"))
            write_file(self.directory / "best.yaml", text.encode(), durable=False)
        write_report(self.directory, self.study.config, records, self.study.importance(), self.study.space, text)


def trial_command(directory: Path) -> list[str]:
    """Return the command that runs a trial in its directory, and writes `outcome.json` there."""
    return [sys.executable, "-m", "jaxstack.tune.trial", str(directory)]


def _kill(child: Child) -> None:
    """Kill a trial's process and all its child processes with SIGKILL, and wait until it has ended."""
    child.send(signal.SIGKILL)
    child.wait(30)


def describe_values(values: Mapping[str, Any]) -> str:
    """Format the hyperparameter values of a trial as one line of text."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )
