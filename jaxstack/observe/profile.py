"""Records a `jax.profiler` trace of a few steps of a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jaxtyping import PyTree

from jaxstack.distributed import coordination


class StepProfiler:
    """Traces the steps `first` to `last` of a run (inclusive, counted from 1) into `directory`.

    Writes `plugins/profile/TIME/*.xplane.pb` for xprof and TensorBoard, `*.trace.json.gz` next to it for
    https://ui.perfetto.dev, and `memory.pb.gz` for `pprof`: the devices' memory after the last step, by the line that
    allocated it. Only files are written: no profiler server is started, and no port is opened. A run that resumes after
    `first` traces the remaining steps of the window; one that resumes after `last` traces nothing.

    Args:
      steps: (first, last); None: trace nothing.
      directory: for the files; those of a further process N are in its folder `process-N`.
      report: called with a line of text when the trace is written.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        directory: str | Path,
        report: Callable[[str], None] | None = None,
    ):
        self._first, self._last = steps or (0, -1)
        index, _ = coordination.process_position()
        self._directory = Path(directory, f"process-{index}") if index else Path(directory)
        self._report = report or (lambda text: None)
        self.active = False

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Return a context manager for dispatching one step, which labels the step with its number in the trace.

        Starts the trace before the first step of the window; `finish_step` ends it.
        """
        if not self.active and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._directory))
            self.active = True
        annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        with annotation if self.active else contextlib.nullcontext():
            yield

    def finish_step(self, step: int, results: PyTree = None) -> None:
        """End the trace after its last step, once `results` (arrays of that step) are computed."""
        if self.active and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End the trace if it is running, such as where the run ends before the last step to trace."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._directory / "memory.pb.gz"))
            self._report(f"profile of steps {self._first} to {self._last}: {self._directory}")
