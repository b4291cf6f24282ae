"""Goodput: the fraction of a run's wall time, restarts included, spent on training steps that were not lost later."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxstack.files import write_file

FILE = "sessions.json"


class Goodput:
    """Measures a run's goodput: records each start and restart in `sessions.json`, and adds up the time of its steps.

    Wall time runs from the first start to now. It includes compiling, saving, evaluating, steps that were repeated
    after a crash, and the time between a crash or a stop and the next start, but not the time after a run had all its
    steps. The first process uses it.

    Args:
      run_dir: the run directory; None: nothing is recorded.
      step: number of steps done at this start.
      train_seconds: time of the steps before this start that still count.
      clock: returns seconds since 1970; default: a clock that nobody can set while the process runs.
    """

    def __init__(self, run_dir: Path | None, step: int, train_seconds: float, clock: Callable[[], float] | None = None):
        self._path = run_dir / FILE if run_dir is not None else None
        clock = self._clock = clock or steady_clock()
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        before = read_sessions(self._path)
        self._train_seconds = train_seconds if before else 0.0  # without records, wall time is counted from now
        self._sessions = [*before, {"began": clock(), "step": step}]
        self._write()

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
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
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
