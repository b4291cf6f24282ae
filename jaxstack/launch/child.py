"""Training processes of a run: starts, watches and ends one with its descendants, and finds stuck and slow ones."""

import collections
import contextlib
import ctypes
import dataclasses
import math
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, TextIO

from jaxstack.cli import MESSAGES
from jaxstack.distributed.parent_death import die_with_parent
from jaxstack.resilience.progress_file import PROGRESS, STACKS, Record, read_record

_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_STACK_LINES = 80
_STACK_SECONDS = 5.0


class Child:
    """A training process that the launcher has started, in its own session.

    Args:
      rank: its number in the whole run.
      command: program and arguments.
      environment: its whole environment.
      folder: for the files with its progress, its stacks and its last messages.
      copies: True if other processes print to the same place. Its lines are then copied there one by one, since the
        launcher makes Python write at once, a line in several parts, which would mix with those of the others. Without
        a prefix it keeps a terminal, which progress bars ask for. False: it inherits the launcher's output.
      prefix: written before each copied line. With a prefix, what it prints as errors goes to the output too.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        copies: bool = False,
        prefix: str = "",
    ):
        self.rank = rank
        self._progress = folder / f"progress-{rank}"
        self._stacks = folder / f"stacks-{rank}"
        self._messages = folder / f"messages-{rank}"
        for path in (self._progress, self._stacks, self._messages):
            path.unlink(missing_ok=True)
        variables = {**environment, PROGRESS: str(self._progress), STACKS: str(self._stacks)}
        if copies:
            variables[MESSAGES] = str(self._messages)
        out, errors = _ways_out(prefix) if copies else (None, None)
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=out,
            stderr=errors, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        self.pid = self._process.pid
        self.started = time.monotonic()
        self._last = Record("other", at=self.started)
        self._pumps = [
            threading.Thread(target=_copy_lines, args=(source, target, prefix), daemon=True)
            for source, target in ((self._process.stdout, sys.__stdout__), (self._process.stderr, sys.__stderr__))
            if source is not None
        ]
        for pump in self._pumps:
            pump.start()

    def poll(self) -> int | None:
        """Return the exit code of the process (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    def record(self) -> Record:
        """Return the newest progress record that the process has written."""
        self._last = read_record(self._progress) or self._last
        return self._last

    def messages(self) -> str:
        """Return the messages with which the process has ended, of which it has printed none; "" if it left none."""
        try:
            return self._messages.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def send(self, signum: int) -> None:
        """Send a signal to the process and to everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def is_stopped(self) -> bool:
        """Return True if the process is suspended (SIGSTOP, a debugger)."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return False
        return any(line.startswith("State:") and line.split()[1] in ("T", "t") for line in status.splitlines())

    def stacks(self) -> str:
        """Return the Python stacks of the process's threads: from py-spy, or else written by the process on SIGUSR1.

        Needs no GIL. Resumes a suspended process.
        """
        suspended = self.is_stopped()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
        deadline = time.monotonic() + _STACK_SECONDS
        text = ""
        while time.monotonic() < deadline and not text.endswith("\n"):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                text = self._stacks.read_text(encoding="utf-8", errors="replace")
        if spy := shutil.which("py-spy"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                text = subprocess.run(
                    [spy, "dump", "--pid", str(self.pid)], capture_output=True, text=True, timeout=30, check=True
                ).stdout
        lines = arrange_stacks(text).splitlines() or ["(no stacks within the time: the process does not answer)"]
        head = ["(it was suspended)"] if suspended else []
        return "\n".join([*head, *lines[:_STACK_LINES]])

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the process to end, then for its output to be printed; return True if it ended."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        for pump in self._pumps:
            pump.join(1.0)
        return True


def arrange_stacks(text: str) -> str:
    """Return a dump of faulthandler with the main thread first, and equal stacks once; other text as it is.

    faulthandler writes the main thread last, after dozens of workers that wait for work.
    """
    threads = [part for part in re.split(r"(?m)^(?=(?:Current t|T)hread 0x)", text) if part.strip()]
    if not all(re.match(r"(Current t|T)hread 0x", part) for part in threads):
        return text
    alike: dict[str, list[str]] = {}
    for part in reversed(threads):
        head, _, frames = part.rstrip().partition("\n")
        alike.setdefault(frames, []).append(head)
    more = {frames: f" and {len(heads) - 1} alike" if len(heads) > 1 else "" for frames, heads in alike.items()}
    return "\n".join(f"{heads[0].rstrip(':')}{more[frames]}:\n{frames}" for frames, heads in alike.items())


def _ways_out(prefix: str) -> tuple[int | None, int | None]:
    """Return what `subprocess.Popen` is to do with the output and the errors of a process whose lines are copied."""
    if prefix:
        return subprocess.PIPE, subprocess.STDOUT
    # A stream that was closed when the launcher began is None.
    own = (sys.__stdout__, sys.__stderr__)
    ways = [None if stream is None or stream.isatty() else subprocess.PIPE for stream in own]
    # Their order stays if both are one file.
    one = all(ways) and os.path.sameopenfile(*(stream.fileno() for stream in own if stream is not None))
    return ways[0], subprocess.STDOUT if one else ways[1]


_WRITING = collections.defaultdict[tuple[int, int], threading.Lock](threading.Lock)
"""Number of a file -> lock that is held while a line is written: a pipe may take a long one in several parts."""


def write_line(target: TextIO | None, line: bytes) -> None:
    """Write a whole line to a stream of the launcher; other threads that call this function write theirs later."""
    if target is None:
        return
    left = memoryview(line)
    with contextlib.suppress(OSError):  # nobody reads our output any more; the pipe of a process must not fill up
        file = os.fstat(target.fileno())
        with _WRITING[file.st_dev, file.st_ino]:
            while left:
                try:
                    left = left[os.write(target.fileno(), left) :]
                except BlockingIOError:
                    select.select([], [target], [])


def _copy_lines(source: IO[bytes], target: TextIO | None, prefix: str) -> None:
    for line in source:
        write_line(target, prefix.encode() + line)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent ends, so that it can find and end them."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)


def end_all(children: Sequence[Child], grace_seconds: float) -> None:
    """End training processes and everything they started: SIGTERM first, SIGKILL after `grace_seconds`."""
    deadline = time.monotonic() + grace_seconds
    for signum in (signal.SIGTERM, signal.SIGCONT):
        for child in children:
            child.send(signum)
    ended = [child.wait(deadline - time.monotonic()) for child in children]
    for child in children:
        child.send(signal.SIGKILL)
    if not all(ended):
        for child in children:
            child.wait(30)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    for child in children:  # whose pipes nothing holds open any more
        child.wait(0.0)


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes that descend from process `pid`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found = []
    edge = {pid}
    while edge:
        edge = {child for child, parent in parents.items() if parent in edge}
        found += edge
    return found


@dataclasses.dataclass(frozen=True)
class Limits:
    """Timeouts for each phase of a run: seconds without progress after which a process counts as stuck."""

    step: float = 300.0
    """Limit between two steps of the training or of the check of its layout, or evaluation batches."""
    start: float = 3600.0
    """Limit until the first step (reading data, restoring, compiling), until the first batch of the first evaluation,
    and between two batches of evaluation tasks, which may compile."""
    save: float = 1800.0
    """Limit on a save that training waits for."""

    def timeout_of(self, record: Record, suspended: bool = False) -> float:
        """Return the timeout for the phase that a process is in; a suspended process has that of a train step.

        A process that has written no record has none: it may be a server, which waits for requests.
        """
        if suspended or _limit_of(record.phase) == "step":
            return self.step if record.step_limit is None else record.step_limit
        if record.phase == "other":
            return math.inf
        return self.save if _limit_of(record.phase) == "save" else self.start


def _limit_of(phase: str) -> str:
    """Return the field of `Limits` for a phase."""
    if phase in ("train", "evaluate", "check"):
        return "step"
    return "save" if phase in ("save", "end") else "start"


def name_limit(record: Record) -> str:
    """Return the setting that is the timeout for the phase that a process is in."""
    limit = _limit_of(record.phase)
    return "resilience.step_seconds" if limit == "step" and record.step_limit is not None else f"--{limit}-seconds"


def find_stuck(
    records: Mapping[int, Record],
    limits: Limits,
    now: float,
    since: float = -math.inf,
    suspended: Mapping[int, Callable[[], bool]] = MappingProxyType({}),
) -> int | None:
    """Return the rank that holds the others up, once a rank is without progress for more than its timeout; else None.

    In a collective the other ranks wait for the one that has taken the fewest steps. Of equal ones it is the one with
    the fewest signs of life, as all ranks run the same program; then the one that fell silent first.

    Args:
      records: newest progress record of each rank.
      limits: seconds of silence that are accepted.
      now: time of the monotonic clock.
      since: silence before this time does not count.
      suspended: rank -> function that returns True if it is suspended; only called beyond the limit of a step.
    """
    silent = set()
    quiet = set()
    begun = any(record.phase != "other" for record in records.values())
    for rank, record in records.items():
        seconds = now - max(record.at, since)
        step = limits.timeout_of(record, suspended=True)
        # A rank without a phase has not come as far as the others, which may wait for it.
        limit = limits.start if begun and record.phase == "other" else limits.timeout_of(record)
        if seconds > limit or (seconds > step and rank in suspended and suspended[rank]()):
            silent.add(rank)
        if seconds > limit / 2:
            quiet.add(rank)
    if not silent:
        return None
    return min(silent | quiet, key=lambda rank: (records[rank].step, records[rank].beat, records[rank].at))


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that slows the others down: its host seconds per step, and the median of the others."""

    rank: int
    own: float
    others: float
    step: float


def find_straggler(before: Mapping[int, Record], after: Mapping[int, Record]) -> Straggler | None:
    """Return the process whose host time per step, between two progress records, slows the others; else None.

    A step takes the same time on all ranks, as they wait for one another in collectives. They differ in the time that
    each spends on its host instead of waiting. A process is reported if it exceeds the median of the others by at least
    a tenth of a step and 2 ms.
    """
    own = {}
    pace = []
    for rank, now in after.items():
        past = before.get(rank)
        if past is None or past.phase != "train" or now.phase != "train" or now.step - past.step < 3:
            return None
        steps = now.step - past.step
        own[rank] = (now.own_seconds - past.own_seconds) / steps
        pace.append((now.at - past.at) / steps)
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median(value for rank, value in own.items() if rank != slowest)
    step = statistics.median(pace)
    if own[slowest] - others < max(0.1 * step, 0.002):
        return None
    return Straggler(slowest, own[slowest], others, step)
