"""What a process tells its supervisor: one small record, overwritten in place, that costs microseconds. No jax."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRESS, STACKS = "JAXSTACK_PROGRESS_FILE", "JAXSTACK_STACKS_FILE"
_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Record:
    """Where a process is. Times are of the monotonic clock, which the processes of a host share."""

    phase: str
    """start, restore, compile, train, evaluate, save or end."""
    step: int = 0
    """Steps handed to the devices."""
    beat: int = 0
    """Grows with every sign of life."""
    at: float = 0.0
    saved: int = -1
    """The newest checkpoint that is committed."""
    own_seconds: float = 0.0
    """On the host between steps, in all. Waiting for the devices, and so for other processes, is not in it."""


class ProgressFile:
    """Writes the record of this process; without a path it does nothing."""

    def __init__(self, path: str | Path | None = None):
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if path else None
        self.record = Record("start")
        self._waited, self._depth, self._first_step = 0.0, 0, 0.0

    @classmethod
    def of_this_process(cls) -> "ProgressFile":
        """The file that the supervisor named in the environment, if any."""
        return cls(os.environ.get(PROGRESS))

    def note(self, phase: str | None = None, **changes: Any) -> None:
        """A sign of life, with what has changed since the last."""
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
        """Around what waits for the devices, and so perhaps for another process."""
        began = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._waited += time.monotonic() - began


def read_record(path: str | Path) -> Record | None:
    """What stands in a process's file; None where nothing was written yet."""
    try:
        return Record(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
