"""The training loop of a run: takes steps, evaluates, saves checkpoints, and logs.

The device never waits for the host: while the host waits for the metrics of a step, the next step is queued already,
and its batch was put on the device while an earlier step ran.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.checkpoint.memory import MemoryCheckpoints
from jaxstack.config.features import fixed_sections
from jaxstack.data.batch_source import items_in_batch
from jaxstack.distributed.coordination import all_gather, broadcast_from_first
from jaxstack.errors import JaxstackError
from jaxstack.heartbeat import doing
from jaxstack.module_arrays.shardings import describe_unsplit
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.number_format import plural
from jaxstack.observe.profile import StepProfiler
from jaxstack.observe.run_log import RunLog
from jaxstack.observe.throughput import Meter
from jaxstack.observe.trackers import last_evaluation, last_logged
from jaxstack.observe.what_ran import refuse_fallbacks, refuse_missing_fp8, summarise_program
from jaxstack.resilience.config import ResilienceConfig, advise_interval
from jaxstack.resilience.exit_on_signal import signal_name
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.resilience.replica_check import StateCheck
from jaxstack.resilience.run_checkpoints import RunCheckpoints
from jaxstack.resilience.skipped_steps import SkippedSteps
from jaxstack.resilience.stop_request import Interrupted, StopRequest
from jaxstack.run_config import FEATURES
from jaxstack.state import LATER_FIELDS
from jaxstack.step import Metrics
from jaxstack.training import Training

_LONG_RUN_SECONDS = 3600
"""Length of a run from which on advice on the interval between saves is worth a line."""
_FIRST_STEPS = 5
"""Number of steps after which a run is known to work."""
_AGREE_SECONDS = 3600
"""Time limit of an agreement of the processes; the launcher ends those that wait for a stuck one earlier."""
_IN_FLIGHT = 2
"""Maximum number of steps on the devices: one runs while the next is queued."""
_DECIDING = (
    "model",
    "optimizer",
    "schedule",
    "precision",
    "adapters",
    "compression",
    "distill",
    "preference",
    "policy",
    "rollout",
    "reward",
    "local_sgd",
)
"""Sections of the configuration that decide a run's result; each checkpoint has a copy of them."""
_DECIDING_OF_TRAIN = ("z_loss", "mtp_loss_weight")
"""Keys of the section `train` that change the loss; the others that decide are told by their own checks."""


def _deciding(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the configuration that decides a run's result."""
    found = {name: configured[name] for name in _DECIDING if name in configured}
    train = configured.get("train", {})
    return found | {"train": {name: train[name] for name in _DECIDING_OF_TRAIN if name in train}}


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """Settings of the training loop: when to save checkpoints, what to log, and when to stop."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    flops_per_token: float | None = None
    """Model FLOPs per item; None: 6 x parameters."""
    forecast: Mapping[str, Any] | None = None
    """The planner's forecast as plain data, which the report compares with what was measured; None: there is none."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The run's configuration as plain data, for trackers and the environment file."""
    describe_evaluation: Callable[[dict[str, float], int | None], dict[str, float]] | None = None
    """Returns further values of an evaluation, such as bits per byte, from (its values, its token limit)."""
    run_tasks: Callable[[Callable[[], None]], dict[str, float]] | None = None
    """Evaluates on something else than held-out data, and returns values to log with each evaluation's. Is given a
    function to call now and then as a sign of life."""
    evaluate_first: bool = False
    """Evaluate a new run before its first step too."""
    planned: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further plain data for the report, computed before the run: `roofline`, see `jaxstack.cost_model.roofline`."""
    on_start: Callable[[], None] | None = None
    """Called on the first process after the checkpoint was restored: the run is known to fit what is there."""
    on_new_run: Callable[[], None] | None = None
    """Called if there is no checkpoint: the trainer may be given parameters to start from."""
    after_first_steps: Callable[[Mapping[str, jax.ShapeDtypeStruct]], None] | None = None
    """Called with the shapes of a batch when some steps are done, so that the run is known to work."""
    say: Callable[[str], None] | None = None
    """Reports messages before the progress display is up; None: print."""


class Loop:
    """The training loop of one run: steps, evaluations, checkpoints and logs.

    Args:
      trainer: what is trained.
      run_dir: directory of checkpoints, metrics and the report; None: nothing is written.
      settings: how the run is saved, observed and stopped.
    """

    def __init__(self, trainer: Training, run_dir: str | Path | None, settings: LoopSettings):
        self.trainer = trainer
        self.settings = settings
        self.run_dir = Path(run_dir).expanduser() if run_dir is not None else None
        self.log = RunLog(self.run_dir, trainer.train.steps, settings.observe, settings.say)
        self.checkpoints: RunCheckpoints | None = None
        self.skips = SkippedSteps(settings.resilience)
        self.skipped = 0
        self.excess: tuple[int, str, str] | None = None
        """After too many skipped steps: the last good step, the reason and advice, see `SkippedSteps.excess`."""
        self.state_check = StateCheck(settings.resilience.checksum_every_steps)
        self.signs = ProgressFile.of_this_process()
        self.signs.restart()
        self.done = 0
        """Steps that are done, counted from the beginning of the run."""
        self.train_seconds: float | None = None
        """Time of the steps before this start; None: not known."""
        self.waiting: Mapping[str, bytes] = {}
        """Metrics of the steps before this start that are in no line of the log, see `RunLog.waiting`."""
        self.save_postponed = self.advised = self.finished = self.evaluated = False

    def run(self) -> dict[str, Any]:
        """Train until the last step of the run and return the last logged metrics, see `Trainer.fit`."""
        train = self.trainer.train
        log = self.log
        with contextlib.ExitStack() as stack:
            if self.run_dir is not None:
                self.checkpoints = self._open_checkpoints(stack, self.run_dir)
            start = self.start = self.done = self._restore()
            if self.settings.on_start is not None and log.first and start <= train.steps:
                with log.writing(start):
                    self.settings.on_start()
            log.show_progress(stack, start)
            evaluated = last_evaluation(self.run_dir, start) if start >= train.steps else {}
            if not evaluated:  # otherwise what waited was written before its line
                log.open_trackers(stack, start, self.settings.settings, self.waiting)
            if start >= train.steps:
                more = f"{start} steps, more than train.steps={train.steps}"
                every = f"all its {plural(start, 'step')}"
                log.say(f"the run has {more if start > train.steps else every}; raise train.steps to go on")
                log.last_values = last_logged(self.run_dir)
                if evaluated:
                    return log.last_values | evaluated
            self._prepare(start)
            stack.push(self._report)
            if (self.settings.evaluate_first and start == 0) or self._lacks_evaluation(start):
                self._evaluate(start)
            if start < train.steps:
                self._steps(start)
            self._evaluate(max(start, train.steps), last=True)
            self.finished = True
        self.signs.note("end")
        return log.last_values

    def _lacks_evaluation(self, start: int) -> bool:
        """Return True if the run ended between the checkpoint that it goes on from and that step's evaluation."""
        every = self.trainer.train.eval_every_steps
        if self.run_dir is None or not every or not start or start % every or start >= self.trainer.train.steps:
            return False
        return broadcast_from_first(not last_evaluation(self.run_dir, start))

    def _open_checkpoints(self, stack: contextlib.ExitStack, run_dir: Path) -> RunCheckpoints:
        """Open the checkpoints in a run's directory; the context `stack` closes them."""
        manager = CheckpointManager(run_dir / "checkpoints", self.settings.checkpoint, report=self.log.say)
        stack.enter_context(manager).claim()
        data = getattr(self.trainer.data, "fingerprint", None) or {}
        configured = self.settings.settings
        return RunCheckpoints(
            manager,
            run_dir,
            sources=getattr(self.trainer.data, "source_listing", None),
            data={**data, **self.trainer.batch_sizes.fingerprint},
            settings=_deciding(configured),
            accept_data_change=self.settings.resilience.accept_data_change,
            say=self.log.say,
            memory=self._open_memory(stack, run_dir),
            fixed=fixed_sections(FEATURES),
        )

    def _open_memory(self, stack: contextlib.ExitStack, run_dir: Path) -> MemoryCheckpoints | None:
        """Open the copies of the state in host memory; the context `stack` closes them. None: none are made."""
        config = self.settings.checkpoint
        if not config.memory_every_steps:
            return None
        memory = MemoryCheckpoints(
            config.memory_every_steps,
            run_dir,
            self.trainer.abstract_stored_state,
            report=self.log.say,
            timeout_minutes=config.timeout_minutes,
        )
        self.log.say(memory.describe())
        return stack.enter_context(memory)

    def _restore(self) -> int:
        """Restore the newest checkpoint, if there is one; return the number of training steps it had taken."""
        self.signs.note("restore", step_limit=self.settings.resilience.step_seconds)
        began = time.perf_counter()
        restored = None
        if self.checkpoints is not None:
            restored = self.checkpoints.restore(self.trainer.abstract_stored_state, LATER_FIELDS)
        if restored is None:
            if self.settings.on_new_run is not None:
                self.settings.on_new_run()
            return 0
        self.trainer.stored_state = restored.state
        self.trainer.data_state = restored.data
        self.skips = SkippedSteps(self.settings.resilience, restored.skipped)
        # Each process may have restored another one's copy in memory, which has that one's measurement.
        self.train_seconds = broadcast_from_first(restored.train_seconds)
        self.waiting = restored.waiting
        self.signs.note(saved=restored.step)
        jax.block_until_ready(self.trainer.state.params)
        seconds = time.perf_counter() - began
        self.log.say(f"resuming from step {restored.step} ({restored.source}, restored in {seconds:.1f} s)")
        if self.checkpoints is not None and self.checkpoints.is_in_memory_only(restored.step):
            # Copies end with the launchers: a signal before the next save would lose the steps since the last one.
            content = self.trainer.stored_state, self.skips.to_json(), self.trainer.data_state, self.train_seconds
            self.checkpoints.save(restored.step, *content, self.waiting)
        return restored.step

    def _prepare(self, start: int) -> None:
        """Compile the train step, and write to the run's log what it will run (kernels, sharding, FLOPs)."""
        trainer = self.trainer
        self.signs.note("compile", step=start)
        abstract = self.abstract_batch = trainer.peek_batch(start)
        self.items_per_row = items_in_batch(abstract) // self.trainer.batch_sizes.full
        began = time.perf_counter()
        with doing("compiling the step"):
            trainer.compile(abstract, create_state=True)
            trainer.compile_smaller(abstract, start)
        if self.settings.observe.fail_on_fallback:
            refuse_fallbacks(trainer.choices)
        ran = trainer.describe()
        if self.settings.observe.fail_on_fallback:
            refuse_missing_fp8(ran)
        self.log.say(f"compiled the step in {time.perf_counter() - began:.1f} s; {summarise_program(ran)}")
        for sentence in trainer.compiler_notes:
            self.log.say(f"warning: {sentence}")
        for sentence in describe_unsplit(ran["sharding"]):
            self.log.say(f"note: {sentence}")
        flops = self.settings.flops_per_token or 6.0 * trainer.count_parameters()
        device = trainer.rules.mesh.devices.flat[0]
        self.meter = Meter(flops, trainer.rules.mesh.size, device.device_kind)
        schedule = self._schedule() if self.log.writes else []
        forecast = {} if self.settings.forecast is None else {"forecast": self.settings.forecast}
        self.log.begin(start, self.meter, ran, schedule, {**self.settings.planned, **forecast}, self.train_seconds)

    def _schedule(self) -> list[list[float]]:
        """Return up to 200 points [step, learning rate] of the learning-rate schedule, for the run's report."""
        rate = self.trainer.learning_rate
        steps = self.trainer.train.steps
        if rate is None:
            return []
        picked = sorted({round(i * (steps - 1) / 199) for i in range(200)})
        rates = jax.jit(jax.vmap(rate))(jax.numpy.asarray(picked))
        return [[step + 1, float(value)] for step, value in zip(picked, rates, strict=True)]

    def _steps(self, start: int) -> None:
        """Take all training steps after step `start`, saving checkpoints and evaluating in between."""
        train = self.trainer.train
        manager = self.checkpoints.manager if self.checkpoints is not None else None
        pending: collections.deque[tuple[int, Metrics, float]] = collections.deque()
        profile = (self.run_dir or Path(".")) / "profile"
        profiler = StepProfiler(self.settings.observe.profile_steps, profile, self.log.say)
        batches = self.trainer.batches(start)
        logs = doing(None)  # its own lines, as many as `observe` asks for
        with logs, StopRequest() as stop, contextlib.closing(profiler), contextlib.closing(batches):
            self.meter.restart()
            for step in range(start + 1, train.steps + 1):
                batch, waited = next(batches, (None, 0.0))
                if batch is None:
                    self._end_of_data(step - 1, pending)
                if len(pending) == _IN_FLIGHT:
                    self._read(*pending.popleft())
                self.signs.note("train", step=step, saved=self._committed())
                with profiler.step(step), self.signs.waiting():
                    metrics = self.trainer.train_step(batch)
                self.signs.note()
                profiler.finish_step(step, metrics)
                self.done = step
                pending.append((step, metrics, waited))
                if step == start + _FIRST_STEPS and self.settings.after_first_steps is not None:
                    self.settings.after_first_steps(self.abstract_batch)
                whole = step % self.trainer.steps_together == 0
                due = manager is not None and (self.save_postponed or manager.should_save(step, train.steps))
                saving = due and whole
                evaluating = train.eval_every_steps and step % train.eval_every_steps == 0 and step < train.steps
                stopping = stop.reached() and whole
                copying = whole and step < train.steps and self._copy_is_due(step)
                if saving or copying or evaluating or stopping or step == train.steps or self.trainer.waits:
                    while pending:
                        self._read(*pending.popleft())
                with self.signs.waiting():
                    if saving or copying or evaluating or stopping or step == train.steps:
                        self._agree_on_skipped()
                    self.state_check.check(step, self.trainer.state, before_save=saving or copying or stopping)
                    # A checkpoint made while steps are skipped might be rolled back: it waits for a step that is taken.
                    self.save_postponed = saving and self.skipped > 0 and step < train.steps
                    if saving and not self.save_postponed:
                        self._save(step)
                    if copying and not self.skipped:
                        self._copy(step)
                    if stopping or (evaluating and self._evaluate(step, stop.reached)):
                        self._stop(step, stop.signum or 0)
            if self.checkpoints is not None:
                self.signs.note("save")
                self.checkpoints.wait()
                self.signs.note(saved=self._committed())
            if stop.heard():  # during the last save: the rest can be done by the next start
                self._stop(train.steps, stop.signum or 0)

    def _end_of_data(self, step: int, pending: Iterable[tuple[int, Metrics, float]]) -> NoReturn:
        """Handle the end of the data before the last step: save a checkpoint and raise JaxstackError."""
        for metrics in pending:
            self._read(*metrics)
        self._agree_on_skipped()
        kept = ""
        if self.checkpoints is not None and step > self.start:
            self._save(step)
            self.checkpoints.wait()
            kept = f"; checkpoint {step} is saved"
        raise JaxstackError(
            f"the data ended after {step} batches, but train.steps is {self.trainer.train.steps}{kept}; give data "
            "without end (a function of the step), or lower train.steps."
        )

    def _read(self, step: int, metrics: Metrics, waited: float) -> None:
        """Wait for a step's metrics, report the step if it was skipped for a spike, and log the metrics."""
        with self.signs.waiting():
            values = self.trainer.read(metrics)
        sizes = self.trainer.batch_sizes
        self.meter.add(self.items_per_row * sizes.rows(step - 1), waited)
        self.skipped = int(values.pop("skipped"))
        limits = [values.pop(f"{name}_limit", float("inf")) for name in ("loss", "grad_norm")]
        if self.skipped:
            self._skip(step, values, limits)
        values.pop("count")
        if self.checkpoints is not None and self.checkpoints.memory is not None:
            values |= self.checkpoints.memory.figures()
        if step == self.start + 1 and values["grad_norm"] == 0 and values["loss"]:
            # A loss of zero has no gradient either, as where all answers to each prompt got the same reward.
            self.log.say("warning: the gradient of every parameter is zero; does the loss depend on the model?")
        tokens = self.items_per_row * sizes.rows_before(step)
        self.log.log_step(step, values, tokens, self.skips.count, sizes.steps_left(step))

    def _skip(self, step: int, values: Mapping[str, float], limits: list[float]) -> None:
        """Report a step that was skipped for a loss or gradient spike; raise JaxstackError after too many in a row."""
        self.log.say(self.skips.add(step, self.skipped, values, limits))
        self.excess = self.excess or self.skips.excess(step, self.skipped)
        if self.excess is not None and not self._reads_own_metrics:
            self._roll_back(*self.excess)

    @property
    def _reads_own_metrics(self) -> bool:
        """True if other processes read the metrics of other models, see `StepWrapper.reads_own_metrics`."""
        return self.trainer.wrapper.reads_own_metrics and jax.process_count() > 1

    def _agree_on_skipped(self) -> None:
        """Let processes that read the metrics of their own models know of one another's skipped steps.

        All call it at the same steps, before they decide on what they do together, such as a save.

        Raises:
          JaxstackError: too many steps of one of them were skipped.
        """
        if not self._reads_own_metrics:
            return
        own = [self.skipped, self.excess, self.skips.unjoined]
        told = all_gather("skipped", own, _AGREE_SECONDS)
        self.skipped = max(skipped for skipped, *_ in told)
        self.skips.join(steps for *_, steps in told)
        if found := [excess for _, excess, _ in told if excess is not None]:
            self._roll_back(*min(found))

    def _roll_back(self, good: int, why: str, advice: str) -> NoReturn:
        """Go back to the newest checkpoint until step `good`, and raise JaxstackError."""
        left = "the last good parameters are in memory only, as there is no run directory"
        if self.checkpoints is not None:
            left = self.checkpoints.roll_back(good)
        raise JaxstackError(f"{why}; {left}. {advice}")

    def _save(self, step: int) -> None:
        """Start to save a checkpoint of this step in the background, unless this step is saved already."""
        if self.checkpoints is None or step == self.checkpoints.saved_step:
            return
        began = time.perf_counter()
        self.signs.note("save", saved=self._committed())
        self.checkpoints.save(step, *self._content())
        self.meter.exclude(time.perf_counter() - began)

    def _copy_is_due(self, step: int) -> bool:
        memory = self.checkpoints.memory if self.checkpoints is not None else None
        return memory is not None and memory.is_due(step)

    def _copy(self, step: int) -> None:
        """Start to copy the state of this step to host memory, beside the next steps."""
        if self.checkpoints is None:
            return
        began = time.perf_counter()
        self.signs.note("save", saved=self._committed())
        sizes = self.trainer.batch_sizes
        self.checkpoints.copy(step, *self._content(), steps_grow=sizes.rows(step - 1) < sizes.full)
        self.meter.exclude(time.perf_counter() - began)

    def _content(self) -> tuple[Any, Any, Mapping[str, np.ndarray], float, Mapping[str, bytes]]:
        """Return the content of a checkpoint.

        It is the train state, the skipped steps, the state of the data, the seconds of the steps, and the metrics that
        wait for room on the disk.
        """
        trainer = self.trainer
        return (
            trainer.stored_state, self.skips.to_json(), trainer.data_state, self.log.train_seconds, self.log.waiting()
        )  # fmt: skip

    def _committed(self) -> int:
        """Return the step of the newest complete checkpoint or copy in memory, as far as it is known."""
        memory = self.checkpoints.memory if self.checkpoints is not None else None
        return max(self._saved(), memory.newest if memory is not None else -1)

    def _saved(self) -> int:
        """Return the step of the newest complete checkpoint. The first time, also log how often to save."""
        record = self.checkpoints.manager.last_save if self.checkpoints is not None else None
        if record is None:
            return self.signs.record.saved
        if not self.advised and self.meter.step_seconds:
            self.advised = True
            self._advise(record.blocking_seconds, record.total_seconds, self.meter.step_seconds)
        return record.step

    def _advise(self, blocking_seconds: float, total_seconds: float, step_seconds: float) -> None:
        """Report how often a long run should save checkpoints, given the durations of a save and of a step."""
        every = self.settings.checkpoint.every_steps
        hours = self.settings.resilience.device_hours_between_failures
        if self.trainer.train.steps * step_seconds >= _LONG_RUN_SECONDS:
            devices = self.trainer.rules.mesh.size
            self.log.say(advise_interval(every, step_seconds, blocking_seconds, total_seconds, devices, hours))

    def _stop(self, step: int, signum: int) -> None:
        """Stop the run after a signal: save a checkpoint and raise Interrupted."""
        kept = "nothing is kept, as there is no run directory"
        self.signs.note("save")
        if self.checkpoints is not None:
            if self.settings.checkpoint.save_on_exit:
                self._save(step)
            self.checkpoints.wait()
            steps = self.checkpoints.manager.all_steps()
            self.signs.note("end", saved=self._committed())
            kept = f"checkpoint {steps[-1]} in {self.run_dir}" if steps else "no checkpoint kept"
        raise Interrupted(
            signum, f"stopped by {signal_name(signum)} after step {step}; {kept}; the same command goes on"
        )

    def _evaluate(self, step: int, stop: Callable[[], bool] = lambda: False, *, last: bool = False) -> bool:
        """Evaluate on held-out data and log the result; return True if `stop` ended the evaluation early.

        All evaluations of a run predict the same tokens, so that their losses make one curve. If they are limited to
        train.eval_tokens, the last one also evaluates on all held-out data; its values are logged as `final_eval_*`.
        """
        began = time.perf_counter()
        train = self.trainer.train
        limit = train.eval_tokens if train.eval_every_steps or not last else None
        stopped = False

        def after_batch() -> bool:
            nonlocal stopped
            self.signs.note("evaluate")
            stopped = stop()
            return stopped

        if self.checkpoints is not None:
            self.checkpoints.leave_devices()
        with doing("evaluating"):
            self.signs.note("evaluate" if self.evaluated else "compile")
            values = self._held_out_values(limit, after_batch)
            if values is None:
                return stopped
            if self.settings.run_tasks is not None:
                self.signs.note("tasks")
                values |= self.settings.run_tasks(lambda: self.signs.note("tasks"))
            if last and limit is not None and values["eval_items"] >= limit:
                whole = self._held_out_values(None, after_batch) or {}
                values |= {f"final_{name}": value for name, value in whole.items()}
        self.evaluated = True
        self.log.log_evaluation(step, values)
        self.meter.exclude(time.perf_counter() - began)
        return False

    def _held_out_values(self, max_tokens: int | None, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Evaluate on held-out data; None if there is none, or `stop` ended the evaluation."""
        values = self.trainer.evaluate(max_tokens, stop)
        if values is not None and self.settings.describe_evaluation is not None:
            values |= self.settings.describe_evaluation(values, max_tokens)
        return values

    def _report(self, kind: object, error: BaseException | None, _: object) -> None:
        """Write the report of the run and how it ended, also if it ended with an error."""
        if not self.log.writes:
            return
        steps = self.checkpoints.manager.all_steps() if self.checkpoints is not None else []
        ended = {
            "state": "finished" if error is None else "stopped" if isinstance(error, Interrupted) else "failed",
            "step": self.done,
            "checkpoint": steps[-1] if steps else None,
            **({} if error is None else {"reason": str(error) or type(error).__name__}),
        }
        self.log.end(ended, self.finished)
