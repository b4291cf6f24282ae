"""Goodput: the share of a run's wall time, over all its starts, that went into training steps which count."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "sessions.json"


class Goodput:
    """Keeps the starts of a run in `sessions.json` and adds up the time of its steps.

    Wall time runs from the first start to now, with compiling, saving, evaluating, steps that a crash made to be
    repeated, and the time between a crash or a stop and the next start. Only the time after a run that had all its
    steps is left out. Used by the first process; `run_dir` None keeps nothing.

    Args:
      train_seconds: time of the steps before this start which still count.
      clock: seconds since 1970.
    """

    def __init__(self, run_dir: Path | None, step: int, train_seconds: float, clock: Callable[[], float] = time.time):
        self._path = run_dir / FILE if run_dir is not None else None
        self._clock = clock
        self._train_seconds = train_seconds
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._sessions = [*read_sessions(self._path), {"began": clock(), "step": step}]
        self._write()

    def add(self, seconds: float) -> None:
        """Time of steps that are done."""
        self._train_seconds += seconds

    def read(self) -> dict[str, float]:
        """The keys of a metrics line: `train_seconds` and `goodput`, a fraction of 1."""
        wall = wall_seconds(self._sessions, self._clock())
        return {"train_seconds": self._train_seconds, "goodput": min(1.0, self._train_seconds / max(wall, 1e-9))}

    def close(self, finished: bool) -> None:
        """Notes the end of this start, and whether the run has all its steps."""
        self._sessions[-1] |= {"ended": self._clock(), "finished": finished}
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self._sessions) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def wall_seconds(sessions: list[dict[str, Any]], now: float) -> float:
    """From the first start to `now`, without the time after a start that finished the run."""
    total = 0.0
    for number, session in enumerate(sessions):
        later = sessions[number + 1]["began"] if number + 1 < len(sessions) else now
        total += (session["ended"] if session.get("finished") else later) - session["began"]
    return total


def read_sessions(path: Path | None) -> list[dict[str, Any]]:
    """The starts of a run so far; none where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
        return [one for one in found if isinstance(one["began"], int | float)]
    except (OSError, ValueError, TypeError, KeyError):
        return []
