"""Lines that show that a command is at work, whenever it has printed nothing for some seconds.

with beating():  # a command
    with doing("searching layouts"):  # prints "searching layouts: 3 s", then "searching layouts: 6 s"
        search()
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

SECONDS = 3.0
"""Longest time without a line."""


class _Heartbeat:
    """Prints what a command is doing on standard error, `SECONDS` after the last output."""

    def __init__(self, work: str | None):
        self.seen = time.monotonic()
        self._work = work
        self._began = self.seen
        self.quiet = False
        self._done = threading.Event()
        self._stream = sys.stderr
        self._thread = threading.Thread(target=self._beat, name="jaxstack heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def change(self, work: str | None, began: float | None = None) -> tuple[str | None, float]:
        """Replace what is done; return what was done before and since when."""
        before = self._work, self._began
        self.seen = time.monotonic()
        self._began = self.seen if began is None else began
        self._work = work
        return before

    def _beat(self) -> None:
        while not self._done.wait(max(0.0, self.seen + SECONDS - time.monotonic())):
            now = time.monotonic()
            if now - self.seen < SECONDS:
                continue
            self.seen = now
            if self._work is not None and not self.quiet:
                try:
                    print(f"{self._work}: {now - self._began:.0f} s", file=self._stream, flush=True)
                except (OSError, ValueError):  # nobody reads it, or it is closed
                    return


class _Watched:
    """A text stream that tells a heartbeat of each write."""

    def __init__(self, stream: TextIO, heartbeat: _Heartbeat):
        self._stream = stream
        self._heartbeat = heartbeat

    def write(self, text: str) -> int:
        self._heartbeat.seen = time.monotonic()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_current: list[_Heartbeat] = []


@contextlib.contextmanager
def beating(work: str | None = "working") -> Iterator[None]:
    """Context of a command, in which a line is printed on standard error after each `SECONDS` without output.

    Args:
      work: what is done at first.
    """
    if _current:  # a command that another one runs
        yield
        return
    heartbeat = _Heartbeat(work)
    _current.append(heartbeat)
    output = cast(TextIO, _Watched(sys.stdout, heartbeat))
    errors = cast(TextIO, _Watched(sys.stderr, heartbeat))
    heartbeat.start()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            yield
    finally:
        heartbeat.stop()
        _current.clear()


@contextlib.contextmanager
def doing(work: str | None) -> Iterator[None]:
    """Context in which the lines say `work`; outside of a command it changes nothing.

    Args:
      work: what is done, such as `compiling`; None: no lines, because it waits for its user or prints its own.
    """
    if not _current:
        yield
        return
    heartbeat = _current[0]
    before = heartbeat.change(work)
    try:
        yield
    finally:
        heartbeat.change(*before)


def silence() -> None:
    """Print no more such lines until the command ends, for example in all processes of a job but the first."""
    for heartbeat in _current:
        heartbeat.quiet = True
