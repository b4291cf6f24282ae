"""The training loop, top to bottom: steps, evaluations, saves, logs.

The device never waits for the host: while the metrics of a step are awaited the next one is queued already, and its
batch was put on the device while an earlier step ran.
"""

import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.data.batch_source import items_in_batch
from jaxstack.data.fingerprint import fingerprint_difference, shared_keys
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.functional.shardings import describe_unsplit
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.environment import write_environment
from jaxstack.observe.goodput import Goodput
from jaxstack.observe.memory import peak_memory_bytes
from jaxstack.observe.profile import StepProfiler
from jaxstack.observe.progress import Progress
from jaxstack.observe.report.page import write_report
from jaxstack.observe.throughput import Meter
from jaxstack.observe.trackers import Trackers, open_trackers
from jaxstack.observe.what_ran import refuse_fallbacks, refuse_missing_fp8, summarise_program
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.resilience.exit_on_signal import signal_name
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.resilience.save_interval import advise_interval
from jaxstack.resilience.skipped_steps import SkippedSteps
from jaxstack.resilience.state_check import StateCheck
from jaxstack.resilience.stop_request import Interrupted, StopRequest
from jaxstack.state import LATER_FIELDS

if TYPE_CHECKING:
    from jaxstack.trainer import Trainer

_IN_FLIGHT = 2
"""Steps that may be on the devices at once: one runs while the next waits behind it."""
_DECIDING = ("model", "optimizer", "schedule", "precision")
"""Sections of a configuration of which each checkpoint keeps a copy."""


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How a run is kept, watched and stopped."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    flops_per_token: float | None = None
    """Model FLOPs an item; None: 6 x parameters."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The run's configuration as plain data, for trackers and the environment file."""
    describe_evaluation: Callable[[dict[str, float], int | None, Callable[[], None]], dict[str, float]] | None = None
    """Adds values to an evaluation's line, such as bits per byte, given it, its `max_tokens` and a sign of life."""
    on_start: Callable[[], None] | None = None
    """Called on the first process once the run has taken up its checkpoint: what it was given fits what is there."""
    on_new_run: Callable[[], None] | None = None
    """Called where there is no checkpoint to take up: the trainer may be given parameters to start from."""
    say: Callable[[str], None] | None = None
    """Takes messages before the progress display is up; None: print."""


class Loop:
    """One run of a `Trainer` in `run_dir` (None: nothing is written)."""

    def __init__(self, trainer: "Trainer", run_dir: str | Path | None, settings: LoopSettings):
        self.trainer, self.settings = trainer, settings
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.first = jax.process_index() == 0
        self.last_values: dict[str, Any] = {}
        self.manager: CheckpointManager | None = None
        self.saved_step = -1
        self.skips, self.skipped = SkippedSteps(settings.resilience), 0
        self.guard = StateCheck(settings.resilience.checksum_every_steps)
        trainer.steps.spike_threshold = settings.resilience.spike_threshold
        self.signs = ProgressFile.of_this_process()
        self.save_owed = self.advised = self.finished = False

    def run(self) -> dict[str, Any]:
        """See `Trainer.fit`."""
        train, observe = self.trainer.train, self.settings.observe
        with contextlib.ExitStack() as stack:
            if self.run_dir is not None:
                self.manager = stack.enter_context(
                    CheckpointManager(
                        self.run_dir / "checkpoints", self.settings.checkpoint, report=lambda text: self._say(text)
                    )
                )
                self.manager.claim()
            start = self.start = self._restore()
            if self.settings.on_start is not None and self.first:
                self.settings.on_start()
            self.progress = stack.enter_context(Progress(train.steps, start, enabled=observe.progress and self.first))
            if start >= train.steps:
                self._say(f"the run has all its {train.steps} steps; raise train.steps to go on")
                self.last_values = last_logged(self.run_dir)
            names = observe.trackers if self.run_dir is not None and self.first else ()
            self.trackers: Trackers = stack.enter_context(
                contextlib.closing(open_trackers(names, self.run_dir or ".", start, self.settings.settings, self._say))
            )
            self._prepare(start)
            stack.callback(self._report)
            if start < train.steps:
                self._steps(start)
            self._evaluate(train.steps, None)
            self.finished = True
        self.signs.note("end")
        return self.last_values

    def _restore(self) -> int:
        """Takes up the newest checkpoint, if there is one; returns the steps that are done."""
        self.signs.note("restore")
        began = time.perf_counter()
        step = self.manager.latest_step() if self.manager is not None else None
        if self.manager is None or step is None:
            if self.settings.on_new_run is not None:
                self.settings.on_new_run()
            return 0
        extra = self.manager.extra(step)
        saved = extra.get("data") if isinstance(extra, dict) else None
        if saved is None:
            raise ConfigError(
                f"{self.run_dir} holds parameters (converted, or saved by another program), not a training run: start "
                f"one with another run.name and run.init_from={self.run_dir}."
            )
        difference = fingerprint_difference(saved, self._data_identity())
        if difference:
            self._accept_data(difference)
        self.trainer.stored_state, _ = self.manager.restore(
            step, self.trainer.abstract_stored_state, later=LATER_FIELDS
        )
        self.skips = SkippedSteps(self.settings.resilience, extra.get("skipped"))
        before = extra.get("settings") or {}
        if changed := fingerprint_difference(before, shared_keys(before, self._what_is_trained())):
            self._say(f"warning: not as checkpoint {step} was trained: {changed}")
        self.saved_step = step
        self.signs.note(saved=step)
        jax.block_until_ready(self.trainer.state.params)
        seconds = time.perf_counter() - began
        self._say(f"resuming from step {step} ({self.run_dir}/checkpoints, restored in {seconds:.1f} s)")
        return step

    def _accept_data(self, difference: str) -> None:
        said = f"the data is not what {self.run_dir} was trained on: {difference}"
        if not self.settings.resilience.accept_data_change:
            raise ConfigError(
                f"{said}. Set it back, start a new run with another run.name, or go on with "
                "resilience.accept_data_change=true."
            )
        self._say(f"warning: {said}; going on, as resilience.accept_data_change is set")

    def _data_identity(self) -> dict[str, Any]:
        """What the position in the data depends on."""
        known = getattr(self.trainer.data, "fingerprint", None) or {}
        return {**known, "global_batch_size": self.trainer.train.global_batch_size}

    def _what_is_trained(self) -> dict[str, Any]:
        """The part of the configuration that decides the result, beside the data."""
        return {name: self.settings.settings[name] for name in _DECIDING if name in self.settings.settings}

    def _prepare(self, start: int) -> None:
        """Compiles the step and writes down what it will run."""
        trainer = self.trainer
        self.signs.note("compile", step=start)
        abstract = trainer.peek_batch(start)
        self.items = items_in_batch(abstract)
        began = time.perf_counter()
        trainer.compile(abstract, create_state=True)
        if self.settings.observe.fail_on_fallback:
            refuse_fallbacks(trainer.choices)
        ran = trainer.describe()
        if self.settings.observe.fail_on_fallback:
            refuse_missing_fp8(ran)
        self._say(f"compiled the step in {time.perf_counter() - began:.1f} s; {summarise_program(ran)}")
        for sentence in trainer.compiler_notes:
            self._say(f"warning: {sentence}")
        for sentence in describe_unsplit(ran["sharding"]):
            self._say(f"note: {sentence}")
        flops = self.settings.flops_per_token or 6.0 * trainer.count_parameters()
        device = trainer.rules.mesh.devices.flat[0]
        self.meter = Meter(flops, trainer.rules.mesh.size, device.device_kind)
        logged = last_logged(self.run_dir)
        kept = logged.get("train_seconds", 0.0) if logged.get("step", 0) <= start else 0.0
        self.goodput = Goodput(self.run_dir if self.first else None, start, kept)
        if self.run_dir is not None and self.first:
            self.environment = {"ran": ran, "schedule": self._schedule()}
            write_environment(self.run_dir, **self.environment)

    def _schedule(self) -> list[list[float]]:
        """Up to 200 points (step, learning rate) of the run's schedule."""
        rate, steps = self.trainer.learning_rate, self.trainer.train.steps
        if rate is None:
            return []
        picked = sorted({round(i * (steps - 1) / 199) for i in range(200)})
        rates = jax.jit(jax.vmap(rate))(jax.numpy.asarray(picked))
        return [[step + 1, float(value)] for step, value in zip(picked, rates, strict=True)]

    def _steps(self, start: int) -> None:
        train, manager = self.trainer.train, self.manager
        pending: collections.deque[tuple[int, Any, float]] = collections.deque()
        profiler = StepProfiler(self.settings.observe.profile_steps, (self.run_dir or Path(".")) / "profile", self._say)
        batches = self.trainer.batches(start)
        with StopRequest() as stop, contextlib.closing(profiler), contextlib.closing(batches):
            self.meter.restart()
            for step in range(start + 1, train.steps + 1):
                batch, waited = next(batches, (None, 0.0))
                if batch is None:
                    raise JaxstackError(
                        f"the data ended after {step - 1} batches, but train.steps is {train.steps}; give data without "
                        "end (a function of the step), or lower train.steps."
                    )
                if len(pending) == _IN_FLIGHT:
                    self._read(*pending.popleft())
                self.signs.note("train", step=step)
                with profiler.step(step), self.signs.waiting():
                    metrics = self.trainer.train_step(batch)
                profiler.finish_step(step, metrics)
                pending.append((step, metrics, waited))
                saving = manager is not None and (self.save_owed or manager.should_save(step, train.steps))
                evaluating = train.eval_every_steps and step % train.eval_every_steps == 0 and step < train.steps
                stopping = stop.reached()
                if saving or evaluating or stopping or step == train.steps:
                    while pending:
                        self._read(*pending.popleft())
                with self.signs.waiting():
                    self.guard.check(step, self.trainer.state, before_save=saving or stopping)
                    # A checkpoint among skipped steps may be one to go back from: it waits for a step that is taken.
                    self.save_owed = saving and self.skipped > 0 and step < train.steps
                    if saving and not self.save_owed:
                        self._save(step)
                    if stopping or (evaluating and self._evaluate(step, train.eval_tokens, stop.reached)):
                        self._stop(step, stop.signum or 0)
            if manager is not None:
                self.signs.note("save")
                manager.wait()
                self.signs.note(saved=self._committed())
            if stop.heard():  # in the last save: what is left to do can wait for the next start
                self._stop(train.steps, stop.signum or 0)

    def _read(self, step: int, metrics: Any, waited: float) -> None:
        """Waits for a step's metrics, checks them, and logs them where it is their turn."""
        with self.signs.waiting():
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.meter.add(self.items, waited)
        self.skipped = int(values.pop("skipped"))
        limits = [values.pop(f"{name}_limit", float("inf")) for name in ("loss", "grad_norm")]
        if self.skipped:
            self._skip(step, values, limits)
        values.pop("count")
        train, every = self.trainer.train, self.settings.observe.log_every
        if step % every and step not in (1, train.steps):
            return
        before = self.meter.total_seconds
        line = {**values, "tokens": step * self.items, **self.meter.read(), "peak_memory_bytes": peak_memory_bytes()}
        self.goodput.add(self.meter.total_seconds - before)
        line |= self.goodput.read()
        if self.skips.count:
            line["skipped_steps"] = self.skips.count
        self.last_values = {**self.last_values, "step": step, **line}
        self.trackers.log(step, line)
        if step <= self.start + every:  # the first step also loaded kernels, and says nothing about the others
            self.meter.forget_pace()
        self.progress.update(step, line, self.meter.eta_seconds(train.steps - step))

    def _skip(self, step: int, values: Mapping[str, float], limits: list[float]) -> None:
        self._say(self.skips.add(step, self.skipped, values, limits))
        if (excess := self.skips.excess(step, self.skipped)) is not None:
            good, why, advice = excess
            raise JaxstackError(f"{why}; {self._roll_back(good)}. {advice}")

    def _roll_back(self, step: int) -> str:
        """Leaves the newest intact checkpoint that is not newer than `step` as the newest; says which."""
        if self.manager is None:
            return "the last good parameters are in memory only, as there is no run directory"
        newest = self.manager.latest_step()
        if newest is not None and newest > step and any(saved <= step for saved in self.manager.all_steps()):
            self.manager.discard_newer(step)
            newest = self.manager.latest_step()
        if newest is None:
            return "no checkpoint was saved before them"
        return f"rolled back to checkpoint {newest}, from which the same command goes on"

    def _save(self, step: int) -> None:
        if self.manager is None or step == self.saved_step:
            return
        began = time.perf_counter()
        self.signs.note("save", saved=self._committed())
        extra = {"batches": step, "data": self._data_identity(), "skipped": self.skips.to_json()}
        extra["settings"] = self._what_is_trained()
        self.manager.save(step, self.trainer.stored_state, extra)
        self.saved_step = step
        self.meter.exclude(time.perf_counter() - began)

    def _committed(self) -> int:
        """The newest checkpoint on disk that this start knows of, and, once, what its cost says of the interval."""
        record = self.manager.last_save if self.manager is not None else None
        if record is None:
            return self.signs.record.saved
        if not self.advised and self.meter.step_seconds:
            self.advised = True
            every, hours = self.settings.checkpoint.every_steps, self.settings.resilience.device_hours_between_failures
            devices, seconds = self.trainer.rules.mesh.size, (record.blocking_seconds, record.total_seconds)
            self._say(advise_interval(every, self.meter.step_seconds, *seconds, devices, hours))
        return record.step

    def _stop(self, step: int, signum: int) -> None:
        kept = "nothing is kept, as there is no run directory"
        self.signs.note("save")
        if self.manager is not None:
            if self.settings.checkpoint.save_on_exit:
                self._save(step)
            self.manager.wait()
            steps = self.manager.all_steps()
            self.signs.note("end", saved=self._committed())
            kept = f"checkpoint {steps[-1]} in {self.run_dir}" if steps else "no checkpoint kept"
        raise Interrupted(
            signum, f"stopped by {signal_name(signum)} after step {step}; {kept}; the same command goes on"
        )

    def _evaluate(self, step: int, max_tokens: int | None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Evaluates and logs; True where `stop` gave it up."""
        began, given_up = time.perf_counter(), False

        def after_batch() -> bool:
            nonlocal given_up
            self.signs.note("evaluate")
            given_up = stop()
            return given_up

        values = self.trainer.evaluate(max_tokens, after_batch)
        if values is None:
            return given_up
        if self.settings.describe_evaluation is not None:
            values.update(self.settings.describe_evaluation(values, max_tokens, lambda: self.signs.note("evaluate")))
        self.last_values = {**self.last_values, "step": step, **values}
        self.trackers.log(step, values)
        shown = [f"held-out loss {values['eval_loss']:.4f}"]
        if "eval_bits_per_byte" in values:
            shown.append(f"{values['eval_bits_per_byte']:.4f} bits per byte")
        self._say(f"step {step}: {', '.join(shown)} ({values['eval_seconds']:.1f} s)")
        self.meter.exclude(time.perf_counter() - began)
        return False

    def _report(self) -> None:
        """Writes the report, also of a run that ends early; memory is known by now."""
        if self.run_dir is None or not self.first:
            return
        memory = self.environment["ran"].get("memory")
        if isinstance(memory, dict):
            memory["measured_peak_bytes"] = peak_memory_bytes()
        try:
            self.trackers.close()
            self.goodput.close(self.finished)
            write_environment(self.run_dir, **self.environment)
            self._say(f"report: {write_report(self.run_dir)}")
        except OSError as error:  # how the run ended matters more than its report
            self._say(f"warning: no report: {error.filename or self.run_dir}: {error.strerror or error}")

    def _say(self, text: str) -> None:
        if not self.first:
            return
        progress = getattr(self, "progress", None)
        say = progress.say if progress is not None else self.settings.say or print
        say(text)


def last_logged(run_dir: Path | None) -> dict[str, Any]:
    """The values of the last training line in a run's metrics.jsonl; empty where there is none."""
    try:
        lines = (Path(run_dir or "") / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):  # a kill has torn the line, or it is somebody else's
            values = json.loads(line)
            if isinstance(values, dict) and "loss" in values:
                return values
    return {}
