"""Records a training run on screen and in its directory: messages, metrics, goodput, environment and report."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxstack.errors import cannot_write, is_full
from jaxstack.files import write_file
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.energy import EnergyMeter, EnergyPrices, start_energy_meter
from jaxstack.observe.environment import write_environment
from jaxstack.observe.noise_scale import NoiseScale
from jaxstack.observe.progress import Progress
from jaxstack.observe.report.page import write_report
from jaxstack.observe.throughput import Meter, peak_memory_bytes
from jaxstack.observe.trackers import Trackers, last_logged, open_trackers

FILE = "sessions.json"
_LOSSES = "losses"
"""Key of the losses since the last logged line beside what waits for each tracker."""


class Goodput:
    """Measures a run's goodput: records each start and restart in `sessions.json`, and adds up the time of its steps.

    Wall time runs from the first start to now. It includes compiling, saving, evaluating, steps that were repeated
    after a crash, and the time between a crash or a stop and the next start, but not the time after a run had all its
    steps. The first process records it; the others add up the time of the steps too, as their copies in memory may be
    those that the first process goes on from.

    Args:
      run_dir: the run directory; None: nothing is recorded.
      step: number of steps done at this start.
      train_seconds: time of the steps before this start that still count.
      clock: returns seconds since 1970; default: a clock that nobody can set while the process runs.
      began: when this start began, by that clock; default: now.
    """

    def __init__(
        self,
        run_dir: Path | None,
        step: int,
        train_seconds: float,
        clock: Callable[[], float] | None = None,
        began: float | None = None,
    ):
        self._path = run_dir / FILE if run_dir is not None else None
        clock = self._clock = clock or steady_clock()
        before = read_sessions(self._path)
        # Without records, wall time is counted from now.
        self._train_seconds = train_seconds if before or run_dir is None else 0.0
        self._sessions = [*before, {"began": clock() if began is None else began, "step": step}]

    def add(self, seconds: float) -> None:
        """Add `seconds`, the duration of finished training steps, to the time that counts as productive."""
        self._train_seconds += seconds

    def read(self) -> dict[str, float]:
        """Return `train_seconds` and `goodput` (a fraction of 1) of the run so far, for a metrics line."""
        wall = wall_seconds(self._sessions, self._clock())
        return {"train_seconds": self._train_seconds, "goodput": min(1.0, self._train_seconds / max(wall, 1e-9))}

    def close(self, finished: bool) -> None:
        """Record when this process stopped training the run, and whether all steps of the run are done."""
        self._sessions[-1] |= {"ended": self._clock(), "finished": finished}
        self.record()

    def record(self) -> None:
        """Write the starts of the run to `sessions.json`."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, (json.dumps(self._sessions) + "\n").encode(), durable=False)


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that never jumps, because it follows the monotonic clock from now on."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def wall_seconds(sessions: list[dict[str, Any]], now: float) -> float:
    """Return a run's wall time from its first start to `now`, without pauses between finishing and being resumed.

    If the clock was set back between two starts, the time between them is unknown and counts as 0.
    """
    total = 0.0
    for number, session in enumerate(sessions):
        later = sessions[number + 1]["began"] if number + 1 < len(sessions) else now
        total += max(0.0, (session["ended"] if session.get("finished") else later) - session["began"])
    return total


def read_sessions(path: Path | None) -> list[dict[str, Any]]:
    """Read the records of a run's starts and restarts so far; none if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
        return [one for one in found if _is_session(one)]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _is_session(one: Any) -> bool:
    times = ("began", "ended") if isinstance(one, dict) and one.get("finished") else ("began",)
    return isinstance(one, dict) and all(isinstance(one.get(name), int | float) for name in times)


class RunLog:
    """Log of a training run: messages, metrics, environment and report; only the first process writes.

    Call `show_progress`, `open_trackers` and `begin` in this order before anything is logged. Messages may come at any
    time. The energy of the GPUs counts from `open_trackers` on.

    Args:
      run_dir: directory of metrics, environment and report; None: nothing is written.
      total_steps: number of steps of the whole run.
      config: what is logged, and to which trackers.
      say: reports messages before the progress display is up; None: print.
    """

    def __init__(
        self, run_dir: Path | None, total_steps: int, config: ObserveConfig, say: Callable[[str], None] | None = None
    ):
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._config = config
        self._say = say
        self.first = jax.process_index() == 0
        self.writes = run_dir is not None and self.first
        """True if this process writes files."""
        self.last_values: dict[str, Any] = {}
        """Newest value of each metric, and their step."""
        self._progress: Progress | None = None
        self._energy: EnergyMeter | None = None
        self._losses: list[float] = []
        self._clock = steady_clock()
        self._began = self._clock()  # what follows, such as compiling, is wall time of the run

    def say(self, text: str) -> None:
        """Print a message, in the first process only."""
        if self.first:
            say = self._progress.say if self._progress is not None else self._say or print
            say(text)

    def show_progress(self, stack: contextlib.ExitStack, start: int) -> None:
        """Open the progress display of a run that has done `start` steps; the exit stack `stack` closes it."""
        enabled = self._config.progress and self.first
        self._progress = stack.enter_context(Progress(self._total_steps, start, enabled=enabled))

    @contextlib.contextmanager
    def writing(self, start: int) -> Iterator[None]:
        """Context that writes files of the run directory. A full disk does not end a run that goes on: it is reported.

        Args:
          start: number of steps that are done.

        Raises:
          JaxstackError: the disk is full, and the run is new.
        """
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            failure = cannot_write(f"the run directory {self._run_dir}", error)
            if start == 0:
                raise failure from None
            self.say(f"warning: {failure}; going on, with its files as they are")

    def open_trackers(
        self,
        stack: contextlib.ExitStack,
        start: int,
        settings: Mapping[str, Any],
        waiting: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Open the configured metrics trackers; the exit stack `stack` closes them. Also starts the energy meter.

        Args:
          stack: closes them.
          start: number of steps that are done.
          settings: the run's configuration as plain data.
          waiting: metrics of the steps that are done which are in no line of the log, see `waiting`.
        """
        self._losses = json.loads(waiting.get(_LOSSES, b"[]"))
        waiting = {name: lines for name, lines in waiting.items() if name != _LOSSES}
        names = self._config.trackers if self.writes else ()
        trackers = open_trackers(names, self._run_dir or ".", start, settings, self.say, waiting)
        self._trackers: Trackers = trackers
        stack.callback(self._close_trackers)
        prices = EnergyPrices(self._config.pue, self._config.price_per_gpu_hour)
        self._energy = start_energy_meter(self._run_dir if self.writes else None, prices, self.say)
        stack.callback(self._energy.close)

    def _close_trackers(self) -> None:
        try:
            self._trackers.close()
        except OSError as error:  # must not hide how the run ended
            self.say(f"warning: metrics are not written: {error.filename or self._run_dir}: {error.strerror or error}")

    def waiting(self) -> dict[str, bytes]:
        """Return metrics for which a full disk has no room, by tracker, and losses that the next line's mean needs."""
        waiting = self._trackers.waiting()
        if not (self._losses and self.first):
            return waiting
        return waiting | {_LOSSES: json.dumps(self._losses).encode()}

    def begin(
        self,
        start: int,
        meter: Meter,
        ran: dict[str, Any],
        schedule: list[list[float]],
        planned: Mapping[str, Any] | None = None,
        train_seconds: float | None = None,
    ) -> None:
        """Record that this process starts or resumes the run, and write `environment.json`.

        Args:
          start: number of steps that are done.
          meter: measures the steps; the caller adds them.
          ran: what the compiled step runs, from `Trainer.describe`.
          schedule: points [step, learning rate].
          planned: see `LoopSettings.planned`.
          train_seconds: time of the steps that are done, see `train_seconds`; default: that of the logged ones.
        """
        self._start = start
        self._meter = meter
        logged = last_logged(self._run_dir)
        self._noise = NoiseScale(start, logged if logged.get("step", 0) <= start else {})
        if train_seconds is None:
            logged_seconds = logged.get("all_train_seconds", logged.get("train_seconds", 0.0))
            train_seconds = float(logged_seconds if logged.get("step", 0) <= start else 0.0)
        folder = self._run_dir if self.first else None
        self._goodput = Goodput(folder, start, train_seconds, self._clock, self._began)
        self._read_energy({})  # what was used until now, for compiling, is not that of steps
        self._environment: dict[str, Any] = {**(planned or {}), "ran": ran, "schedule": schedule}
        with self.writing(start):
            self._goodput.record()
            if self._run_dir is not None and self.writes:
                write_environment(self._run_dir, **self._environment)

    @property
    def train_seconds(self) -> float:
        """Time of all steps of the run so far that count, in seconds, those after the last logged line included."""
        return self._goodput.read()["train_seconds"] + self._meter.unread_seconds

    def log_step(
        self, step: int, values: Mapping[str, float], tokens: int, skipped_steps: int, steps_left: float | None = None
    ) -> None:
        """Log a step's metrics, speed, memory and goodput, at the first step, the last, and every `log_every` steps.

        Must be called for every step, in their order.

        Args:
          step: the step, counted from 1.
          values: its metrics.
          tokens: number of items (tokens) of all steps so far.
          skipped_steps: number of steps of the run that were skipped.
          steps_left: remaining steps in steps of the present size; default: all of one size.
        """
        values = self._noise.update(values)
        if math.isfinite(values.get("loss", math.nan)):
            self._losses.append(values["loss"])
        every = self._config.log_every
        if step % every and step not in (1, self._total_steps):
            return
        before = self._meter.total_seconds
        if self._losses:
            values = {**values, "mean_loss": math.fsum(self._losses) / len(self._losses)}
            self._losses.clear()
        line = {**values, "tokens": tokens, **self._meter.read(), "peak_memory_bytes": peak_memory_bytes()}
        self._goodput.add(self._meter.total_seconds - before)
        productive = self._goodput.read()
        if "train_seconds" in line:  # of this step, beside the seconds of its rollout
            productive["all_train_seconds"] = productive.pop("train_seconds")
        line |= productive
        line |= self._read_energy(line)
        if skipped_steps:
            line["skipped_steps"] = skipped_steps
        self.last_values = {**self.last_values, "step": step, **line}
        self._trackers.log(step, line)
        if step <= self._start + every:  # the first steps also load kernels, and are slower than the others
            self._meter.forget_pace()
        if self._progress is not None:
            left = self._total_steps - step if steps_left is None else steps_left
            self._progress.update(step, line, self._meter.eta_seconds(left))

    def _read_energy(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return energy and cost so far, as values for a metrics line."""
        if self._energy is None:
            return {}
        return self._energy.read(line.get("tokens", 0), line.get("tokens_per_second"))

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of an evaluation (held-out loss or tasks) after `step` training steps."""
        self.last_values = {**self.last_values, "step": step, **values}
        self._trackers.log(step, values)
        whole = "final_eval_loss" in values
        tokens = f" on the first {values['eval_items']:,.0f} held-out tokens" if whole else ""
        if "eval_reward" in values:
            self.say(f"step {step}: held-out reward {_describe_rewards(values)}")
            return
        self.say(f"step {step}: held-out loss {_describe_evaluation(values, 'eval', tokens)}")
        if whole:
            tokens = f" on all {values['final_eval_items']:,.0f} held-out tokens"
            self.say(f"final: held-out loss {_describe_evaluation(values, 'final_eval', tokens)}")

    def end(self, ended: Mapping[str, Any], finished: bool) -> None:
        """Write the final report, with the measured peak memory and how the run ended.

        Args:
          ended: plain data for `ended` in the environment.
          finished: True if the run has all its steps.
        """
        if self._run_dir is None or not self.writes:
            return
        self._environment["ended"] = ended
        if self._energy is not None:
            self._energy.close()  # so that the last sample counts
            if used := self._read_energy(self.last_values):
                self.last_values |= used
                self._environment["energy"] = used
        memory = self._environment["ran"].get("memory")
        if isinstance(memory, dict):
            memory["measured_peak_bytes"] = peak_memory_bytes()
        try:
            self._trackers.close()
            self._goodput.close(finished)
            write_environment(self._run_dir, **self._environment)
            self.say(f"report: {write_report(self._run_dir)}")
        except OSError as error:  # must not hide the error that ended the run
            self.say(f"warning: no report: {error.filename or self._run_dir}: {error.strerror or error}")


def _describe_rewards(values: Mapping[str, float]) -> str:
    """Return an evaluation's rewards of sampled and of greedy answers, and its duration."""
    seconds = f"{values['eval_seconds']:.1f} s"
    return f"{values['eval_reward']:.4f} sampled, {values['eval_reward_greedy']:.4f} greedy ({seconds})"


def _describe_evaluation(values: Mapping[str, float], prefix: str, tokens: str) -> str:
    """Return an evaluation's loss, bits per byte or accuracy, and duration, from values named `{prefix}_loss` etc."""
    found = {"bits per byte": values.get(f"{prefix}_bits_per_byte"), "accuracy": values.get(f"{prefix}_accuracy")}
    shown = "".join(f", {value:.4f} {name}" for name, value in found.items() if value is not None)
    return f"{values[f'{prefix}_loss']:.4f}{tokens}{shown} ({values[f'{prefix}_seconds']:.1f} s)"
