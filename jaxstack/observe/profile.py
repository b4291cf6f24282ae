"""A `jax.profiler` trace over a few steps of a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


class StepProfiler:
    """Traces steps (counted from 1, first and last included) into `directory`.

    It leaves `plugins/profile/TIME/*.xplane.pb` for xprof and TensorBoard, `*.trace.json.gz` beside it for
    https://ui.perfetto.dev, and `memory.pb.gz`: what the devices held after the last step, by the line that allocated
    it, for `pprof`. Only files are written: no profiler server is started, no port opened. With `steps=None` it does
    nothing. A run that resumes behind `first` traces what is left of the window; one that resumes behind `last`,
    nothing.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        directory: str | Path,
        report: Callable[[str], None] | None = None,
    ):
        self._first, self._last = steps or (0, -1)
        self._directory = Path(directory)
        self._report = report or (lambda text: None)
        self.active = False

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround the dispatch of one step, so that the trace shows it under its number.

        Starts the trace before the first step of the window. A trace that is running ends with `finish_step`.
        """
        if not self.active and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._directory))
            self.active = True
        annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        with annotation if self.active else contextlib.nullcontext():
            yield

    def finish_step(self, step: int, results: Any = None) -> None:
        """End the trace after its last step, once `results` (arrays of that step) are computed."""
        if self.active and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End a running trace, also when the run ends inside the window."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._directory / "memory.pb.gz"))
            self._report(f"profile of steps {self._first} to {self._last}: {self._directory}")
