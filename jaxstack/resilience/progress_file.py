"""Progress record of a process, in a small file that its supervisor reads; writes take microseconds. Imports no jax."""

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRESS = "JAXSTACK_PROGRESS_FILE"
STACKS = "JAXSTACK_STACKS_FILE"
_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Record:
    """Progress record of a process, which its supervisor reads: phase, step, last sign of life, newest checkpoint.

    Times are of the monotonic clock, shared by all processes of a host.
    """

    phase: str
    """start, check (of the layout), restore, compile, train, evaluate, tasks, save or end. A first evaluation begins as
    compile. other: a process that has written no record, as of a command that has none."""
    step: int = 0
    """Number of steps that were dispatched to the devices."""
    beat: int = 0
    """Counter that grows with every sign of life."""
    at: float = 0.0
    saved: int = -1
    """Step of the newest committed checkpoint; -1: none."""
    step_limit: float | None = None
    """Limit on the time of a step that the run has set itself; None: that of the supervisor."""
    own_seconds: float = 0.0
    """Total time on the host between steps, without waiting for the devices, and so for other processes."""


class ProgressFile:
    """Writes the progress record of this process to a file for its supervisor; without a path, does nothing."""

    def __init__(self, path: str | Path | None = None):
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if path else None
        self.is_read = self._handle is not None
        """True if a launcher supervises this process, and reads the file."""
        self.record = Record("start")
        self._waited = 0.0
        self._depth = 0
        self._first_step = 0.0

    @staticmethod
    @functools.cache
    def of_this_process() -> "ProgressFile":
        """Return the one writer of the file that the supervisor named in the environment, if any.

        A second one would write another step, phase and limit over those of the first.
        """
        return ProgressFile(os.environ.get(PROGRESS))

    def restart(self) -> None:
        """Begin the record of another run of this process: it has neither steps nor checkpoints yet."""
        self._waited = self._first_step = 0.0
        self.record = Record("start", beat=self.record.beat)
        self.note()

    def alive(self) -> None:
        """Give a sign of life, if this process has a record: without one, the supervisor does not count its silence."""
        if self.record.beat:
            self.note()

    @contextlib.contextmanager
    def during(self, phase: str, step_limit: float | None) -> Iterator[None]:
        """Context manager in which this process is in another phase, with another limit on the time of a step."""
        before = self.record
        self.note(phase, step_limit=step_limit)
        try:
            yield
        finally:
            self.note(before.phase, step_limit=before.step_limit)

    def note(self, phase: str | None = None, **changes: Any) -> None:
        """Update the progress record and write it to the file, as a sign of life for the supervisor.

        Args:
          phase: the new phase, if it has changed.
          **changes: fields of `Record` that have changed.
        """
        now = time.monotonic()
        if phase == "train":
            self._first_step = self._first_step or now - self._waited
            changes["own_seconds"] = now - self._first_step - self._waited
        beat = self.record.beat + 1
        self.record = dataclasses.replace(self.record, phase=phase or self.record.phase, beat=beat, at=now, **changes)
        if self._handle is not None:
            line = json.dumps(dataclasses.asdict(self.record)).encode()
            os.pwrite(self._handle, line.ljust(_BYTES - 1) + b"\n", 0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager: time inside it counts as waiting for devices or other processes, not as host time."""
        began = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._waited += time.monotonic() - began


def read_record(path: str | Path) -> Record | None:
    """Read the progress record of a process from its file; None if nothing was written yet."""
    try:
        return Record(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
