"""Supervisor of a run's processes on one node: starts, watches and ends them together, and restarts them."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from jaxstack.checkpoint import memory_folder
from jaxstack.distributed.cluster import (
    COORDINATOR,
    COUNT,
    FEWER_COUNT,
    FULL_COUNT,
    INDEX,
    LOCAL_DEVICES,
    NODE_RANK,
    NODES,
    Nodes,
    count_gpus,
    split_devices,
)
from jaxstack.errors import ATTEMPT, ConfigError
from jaxstack.launch import cleanup
from jaxstack.launch.child import (
    Child,
    Limits,
    adopt_orphans,
    end_all,
    find_straggler,
    find_stuck,
    name_limit,
    write_line,
)
from jaxstack.launch.cleanup import CleanupProcess
from jaxstack.launch.rendezvous import Change, Rendezvous
from jaxstack.observe.number_format import plural
from jaxstack.resilience.exit_on_signal import SAME_SECONDS, stop_signals
from jaxstack.resilience.progress_file import Record


class RestartBudget:
    """Number of restarts that a run may still take; a new checkpoint resets it to its full size.

    Args:
      restarts: size of the budget.
    """

    def __init__(self, restarts: int):
        self._size = self.left = restarts
        self._best = -1

    def spend(self, saved: int) -> bool:
        """Take one restart from the budget, refilled first if checkpoint `saved` is new; False if none is left."""
        if saved > self._best:
            self._best = saved
            self.left = self._size
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    @property
    def delay_seconds(self) -> float:
        """Seconds to wait before the next start: longer with each failure in a row, up to half a minute."""
        return min(30.0, 2.0 ** (self._size - self.left - 1))


_LOOK_SECONDS = 0.1
_STRAGGLER_SECONDS = 60.0
_END_SECONDS = 3.0
_PAUSE_SECONDS = 5.0
"""If a look is this late, the whole job was suspended, and the silence of its processes means nothing."""
_STOPPED = (143, 130, 129)
_BEFORE_STEPS = ("other", "start", "check", "restore", "compile")
"""Phases of a process that has not taken a step yet."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of the launcher on a node: a training command, its number of processes, timeouts and restarts."""

    command: tuple[str, ...]
    processes: int = 1
    """Number of processes on this node."""
    nodes: Nodes = Nodes()
    limits: Limits = Limits()
    restarts: int = 3
    grace_seconds: float = 120.0
    """Time for a save after SIGTERM."""
    peers_seconds: float = 15.0
    """Time after which the other nodes have noticed a failure, and have ended too."""
    fewest_nodes: int = 1
    """Number of nodes with which the run may go on after a loss; only with `rendezvous`."""
    rendezvous: Path | None = None
    """Folder in which the launchers meet, so that the nodes may change from start to start; then `nodes` has the number
    of all nodes, this node's index, and an address of this node. None: the nodes are fixed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of running the processes once, until they end: exit code (0: done), reason, and newest checkpoint.

    The code is None if they were ended to go on with other nodes.
    """

    code: int | None
    reason: str
    saved: int
    trained: bool = False


class Supervisor:
    """Runs the processes of a training command until they are done or have failed too often."""

    def __init__(self, job: Job):
        self.job = job
        self._signum: int | None = None
        self._heard = 0.0
        self._told: dict[int, float] = {}
        self._memory: Path | None = None
        self._rendezvous: Rendezvous | None = None

    def run(self) -> int:
        """Start the processes, and restart them after failures, until the job is done or has failed too often.

        Returns:
          The exit code: 0, 143, 130 or 129 after a signal, 2 for a wrong configuration, 1 after too many failures.
        """
        folder = Path(tempfile.mkdtemp(prefix="jaxstack-launch-"))
        self._memory = memory_folder.make_folder()
        cleanup = CleanupProcess(folder, self._memory)
        adopt_orphans()
        budget = RestartBudget(self.job.restarts)
        attempt = 0
        newest = -1
        try:
            with self._signals(), self._open_rendezvous():
                while True:
                    attempt += 1
                    nodes = self._meet()
                    if isinstance(nodes, int):
                        return nodes
                    began = time.monotonic()
                    outcome = self._attempt(folder, attempt, nodes)
                    if self._goes_on(outcome, nodes):
                        continue
                    if outcome.code in (0, 2, *_STOPPED):
                        return self._leave(outcome.code)
                    allowed = budget.spend(outcome.saved)
                    newest = max(newest, outcome.saved)
                    saved = f"step {newest} is saved" if newest >= 0 else "nothing is saved"
                    say(f"start {attempt} failed after {time.monotonic() - began:.0f} s: {outcome.reason}; {saved}")
                    if not allowed:
                        say(f"giving up: {self.job.restarts} restarts brought no new checkpoint (--max-restarts)")
                        return self._leave(1)
                    waits = nodes.count > 1 and self._rendezvous is None
                    delay = budget.delay_seconds + (self.job.peers_seconds if waits else 0)
                    say(f"starting again in {delay:.0f} s; without a new checkpoint {budget.left} more times")
                    self._sleep(delay)
                    if self._signum is not None:
                        return 128 + self._signum
        finally:
            cleanup.close()
            shutil.rmtree(folder, ignore_errors=True)
            if self._memory is not None:
                shutil.rmtree(self._memory, ignore_errors=True)

    @contextlib.contextmanager
    def _open_rendezvous(self) -> Iterator[None]:
        """Context in which this launcher meets the others, if the job's nodes may change."""
        job = self.job
        if job.rendezvous is None or job.nodes.coordinator is None:
            yield
            return
        count = job.nodes.count
        self._rendezvous = Rendezvous(job.rendezvous, job.nodes.rank, job.nodes.coordinator, job.fewest_nodes, count)
        try:
            yield
        finally:
            self._leave(1 if self._signum is None else 128 + self._signum)
            self._rendezvous.close()

    def _meet(self) -> Nodes | int:
        """Return the nodes of the next start and this one's place; an exit code if there is none."""
        if self._rendezvous is None:
            return self.job.nodes
        nodes = self._rendezvous.meet(lambda: self._signum is not None, say)
        if nodes is None:
            return 128 + (self._signum or signal.SIGTERM)
        if isinstance(nodes, Nodes) and nodes.count < self.job.nodes.count:
            say(f"starting with {nodes.count} of {plural(self.job.nodes.count, 'node')}, as node {nodes.rank}")
        return nodes

    def _goes_on(self, outcome: Outcome, nodes: Nodes) -> bool:
        """Tell the other nodes that a start has ended; return True if the run goes on with other nodes at once."""
        group = self._rendezvous
        if group is None:
            return False
        if outcome.code == 0:
            return False
        group.ended(trained=outcome.trained)
        if outcome.code == 2 and group.refuse(nodes.count):
            say(f"the run cannot use {plural(nodes.count, 'node')}; going on with another number")
            return True
        stopped_there = outcome.code in _STOPPED and self._signum is None and group.others_stopped_it()
        return outcome.code is None or stopped_there

    def _leave(self, code: int) -> int:
        if self._rendezvous is not None:
            self._rendezvous.leave(code)
        return code

    def _attempt(self, folder: Path, attempt: int, nodes: Nodes) -> Outcome:
        before = cleanup.list_files()
        children = self._start(folder, attempt, nodes)
        try:
            code, reason = self._watch(children)
        finally:
            end_all(children, _END_SECONDS)
            _print_messages(children)
            if left := cleanup.remove_left_behind(before):
                say(f"removed {plural(len(left), 'file')} that it had left in {cleanup.FOLDER}")
        records = [child.record() for child in children]
        trained = any(record.phase not in _BEFORE_STEPS for record in records)
        return Outcome(code, reason, max(record.saved for record in records), trained)

    def _start(self, folder: Path, attempt: int, nodes: Nodes) -> list[Child]:
        job = self.job
        total = job.processes * nodes.count
        first = job.processes * nodes.rank
        shared = {**os.environ, ATTEMPT: str(attempt), "PYTHONUNBUFFERED": "1"}
        if self._memory is not None:
            shared[memory_folder.VARIABLE] = str(self._memory)
        # For `serve --replicas`, which starts engines of its own on each node.
        shared |= {NODES: str(nodes.count), NODE_RANK: str(nodes.rank)}
        if job.rendezvous is not None:
            shared |= {FULL_COUNT: str(job.processes * job.nodes.count)}
        if job.rendezvous is not None and nodes.count > job.fewest_nodes:
            shared |= {FEWER_COUNT: str(job.processes * (nodes.count - 1))}
        # A single process is told its place too: otherwise it would take that of its task from Slurm's variables.
        shared |= {COORDINATOR: nodes.coordinator or f"127.0.0.1:{free_port()}", COUNT: str(total)}
        gpus = count_gpus() if job.processes > 1 else 0
        children = []
        for local in range(job.processes):
            rank = first + local
            own = {INDEX: str(rank)}
            if gpus:
                own[LOCAL_DEVICES] = ",".join(map(str, split_devices(gpus, job.processes, local)))
            copies = rank > 0 or job.processes > 1
            prefix = f"[{rank}] " if rank else ""
            try:
                children.append(Child(rank, job.command, shared | own, folder, copies=copies, prefix=prefix))
            except OSError as error:
                end_all(children, 0.0)
                raise ConfigError(f"{job.command[0]} cannot be started: {error.strerror}") from None
        return children

    def _watch(self, children: Sequence[Child]) -> tuple[int | None, str]:
        """Watch the processes until all are done, or one fails or is stuck; return an exit code and the reason.

        The code is None if they are to be started again with other nodes. Some of the children may still be running.
        """
        forwarded: float | None = None
        looked = time.monotonic()
        past = {child.rank: child.record() for child in children}
        now = awake = looked
        while True:
            self._sleep(_LOOK_SECONDS)
            before = now
            now = time.monotonic()
            if now - before > _PAUSE_SECONDS:
                awake = now
            if self._signum is not None and forwarded is None:
                forwarded = now
                self._leave(128 + self._signum)
                for child in children:
                    child.send(self._signum)
            codes = {child.rank: child.poll() for child in children}
            running = [child for child in children if codes[child.rank] is None]
            failed = {rank: code for rank, code in codes.items() if code not in (None, 0, *_STOPPED)}
            stopped = [code for code in codes.values() if code in _STOPPED]
            if forwarded is not None:
                if not running or now - forwarded > self.job.grace_seconds:
                    return self._stopped(running)
            elif stopped and (failed or not running):
                # The others cannot continue without a process that was asked to stop, however they react.
                return stopped[0], "stopped by a signal"
            elif failed:
                return self._failed(failed, {child.rank: child.record() for child in children}, running)
            elif not running:
                return 0, "done"
            elif self._rendezvous is not None and (change := self._rendezvous.change()) is not None:
                return self._end_for(change, children)
            else:
                records = {child.rank: child.record() for child in running}
                suspended = {child.rank: child.is_stopped for child in running}
                stuck = find_stuck(records, self.job.limits, now, awake, suspended)
                if stuck is not None:
                    return 1, self._stuck(stuck, records, running)
                if now - looked > _STRAGGLER_SECONDS:
                    self._name_straggler(past, records)
                    looked = now
                    past = records

    def _end_for(self, change: Change, children: Sequence[Child]) -> tuple[int | None, str]:
        """End the processes because the nodes change, after a save if there is no hurry; return code and reason."""
        say(f"{change.text}; starting again with the nodes that are present")
        if change.can_save:
            for child in children:
                child.send(signal.SIGTERM)
            deadline = time.monotonic() + self.job.grace_seconds
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if all(child.poll() == 0 for child in children):
                return 0, "done"
        return None, change.text

    def _stopped(self, running: Sequence[Child]) -> tuple[int, str]:
        signum = self._signum or signal.SIGTERM
        if running:
            say(f"{_ranks(running)} did not end within {self.job.grace_seconds:.0f} s of the signal")
        return 128 + signum, "stopped by a signal"

    def _failed(self, failed: dict[int, int], records: dict[int, Record], running: Sequence[Child]) -> tuple[int, str]:
        reason = ", ".join(
            f"rank {rank} {_describe_code(code)}{_describe_place(records[rank])}" for rank, code in failed.items()
        )
        # jax ends the other processes when one falls silent, so the silent one is the cause.
        for child in running:
            if child.is_stopped():
                reason += f"; rank {child.rank} was suspended"
                say(f"stacks of rank {child.rank} (process {child.pid}):\n{child.stacks()}")
        if 2 not in failed.values():
            return 1, reason
        deadline = time.monotonic() + _END_SECONDS
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            self._sleep(_LOOK_SECONDS)  # they are about to find the same configuration wrong
        return 2, reason  # what else they fail with, they do because that process is missing

    def _stuck(self, rank: int, records: dict[int, Record], running: Sequence[Child]) -> str:
        record = records[rank]
        suspended = any(child.rank == rank and child.is_stopped() for child in running)
        limits = self.job.limits
        # Without a record it has not come as far as the others, see `find_stuck`.
        never_began = record.phase == "other" and not suspended
        limit = limits.start if never_began else limits.timeout_of(record, suspended)
        reason = (
            f"rank {rank} gave no sign of life for {time.monotonic() - record.at:.0f} s in phase {record.phase!r} "
            f"at step {record.step} (limit {limit:.0f} s)"
        )
        longer = "" if suspended else f"; if it only needs longer, raise {name_limit(record)}"
        say(f"{reason}; stacks of all processes of this node follow{longer}")
        for child in sorted(running, key=lambda child: child.rank != rank):
            say(f"stacks of rank {child.rank} (process {child.pid}):\n{child.stacks()}")
        return reason

    def _name_straggler(self, past: dict[int, Record], records: dict[int, Record]) -> None:
        found = find_straggler(past, records)
        if found is None or time.monotonic() - self._told.get(found.rank, -1e9) < 600:
            return
        self._told[found.rank] = time.monotonic()
        say(
            f"rank {found.rank} holds the others up: it spends {1e3 * found.own:.0f} ms of a step "
            f"({1e3 * found.step:.0f} ms) on its host, the others {1e3 * found.others:.0f} ms"
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def receive(signum: int, _: FrameType | None) -> None:
            now = time.monotonic()
            if self._signum is not None and signum == signal.SIGINT and now - self._heard > SAME_SECONDS:
                self.job = dataclasses.replace(self.job, grace_seconds=0.0)  # a second Ctrl-C: end at once
            if self._signum is None:
                self._signum = signum
                self._heard = now

        before = {signum: signal.signal(signum, receive) for signum in stop_signals()}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and (self._signum is None or seconds <= _LOOK_SECONDS):
            time.sleep(min(left, _LOOK_SECONDS))


def say(text: str) -> None:
    """Print a message of the launcher to standard error."""
    write_line(sys.stderr, f"jaxstack launch: {text}\n".encode())


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _describe_code(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _describe_place(record: Record) -> str:
    """Return the phase and step in which a process ended; "" if it has told none."""
    return "" if record.phase == "other" else f" in phase {record.phase!r} at step {record.step}"


def _print_messages(children: Sequence[Child]) -> None:
    """Print the messages with which processes have ended: equal ones once, without ranks if all of several have it."""
    ranks: dict[str, list[str]] = {}
    for child in children:
        if text := child.messages():
            ranks.setdefault(text, []).append(str(child.rank))
    for text, found in ranks.items():
        prefix = f"[{','.join(found)}] " if len(found) < max(2, len(children)) else ""
        for line in text.splitlines():
            write_line(sys.__stderr__, f"{prefix}{line}\n".encode())


def _ranks(children: Sequence[Child]) -> str:
    return "rank " + ", ".join(str(child.rank) for child in children)
