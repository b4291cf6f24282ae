"""Rendezvous of a run's launchers, one on each node, in a folder that they share; decides which nodes take part.

Each launcher writes one small file, about once a second, and reads those of the others: no launcher is needed by the
others, and any of them may be lost for good. The first node that is present proposes a start of the run, a `Plan`; each
member adopts it once its processes of earlier starts have ended, and starts new ones when all members have adopted it.
"""

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from jaxstack.distributed.cluster import Nodes
from jaxstack.errors import ConfigError, cannot_write

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 30.0
_CLOSE_SECONDS = 5.0


Members: TypeAlias = tuple[tuple[int, str], ...]
"""Rank of nodes, and session of the launcher of each."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A start of the run on some of its nodes."""

    number: int
    """Number of the start, from 1."""
    members: Members
    """Rank and session of each node that takes part, by rank."""
    coordinator: str
    """HOST:PORT of the first of them."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """State of a node's launcher, as it writes it into its file for the other nodes."""

    session: str
    """Random name of its launcher: a node that was lost and comes back has another one."""
    address: str
    """HOST:PORT at which its first process would listen as the coordinator."""
    beat: int = 0
    """Grows as long as its launcher lives."""
    plan: Plan | None = None
    """The start that it has adopted."""
    proposed: Plan | None = None
    """The start that it has proposed last."""
    running: bool = False
    """True while processes of `plan` run."""
    ended: int = 0
    """Number of the newest start whose processes have ended here."""
    trained: tuple[int, ...] = ()
    """Numbers of nodes with which the run has trained."""
    unfit: tuple[Members, ...] = ()
    """Members of starts that ended for their configuration: the run's layout does not allow their number, or one of
    them was started with another configuration."""
    bounds: tuple[int, int] = (0, 0)
    """Least and largest number of nodes of its command line."""
    left: int | None = None
    """Exit code of its launcher, which has ended or is about to; 0: the run is done."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Reason to end the processes that run: what has happened, and whether they can save first."""

    text: str
    can_save: bool


def newest_plan(notices: Mapping[int, Notice]) -> Plan | None:
    """Return the plan with the highest number; of several, one that runs. All nodes choose the same one."""
    known = [
        (plan.number, notice.running and plan == notice.plan, plan.members, plan)
        for notice in notices.values()
        for plan in (notice.plan, notice.proposed)
        if plan is not None
    ]
    return max(known, key=lambda entry: entry[:3])[3] if known else None


def propose(notices: Mapping[int, Notice], rank: int, smallest: int, largest: int, *, patient: bool) -> Plan | None:
    """Return the plan that a node should propose now; None if another node proposes, or nothing is to be changed.

    Args:
      notices: those of all nodes that are alive, by rank.
      rank: this node.
      smallest: least number of nodes that the run may use.
      largest: number of all nodes.
      patient: True while a first start should wait for all nodes.
    """
    bounds = notices[rank].bounds
    present = {other: one for other, one in notices.items() if one.left is None and one.bounds == bounds}
    if not present or min(present) != rank:
        return None
    there = {(other, notice.session) for other, notice in present.items()}
    unfit = {len(members) for notice in present.values() for members in notice.unfit if there.issuperset(members)}
    sizes = [size for size in range(smallest, min(largest, len(present)) + 1) if size not in unfit]
    if not sizes:
        return None
    current = newest_plan(notices)
    whole = current is not None and all(_takes_part(present.get(r), session, current) for r, session in current.members)
    if whole and current is not None and max(sizes) <= len(current.members):
        return None
    if not whole and any(notice.running for notice in present.values()):
        return None  # their processes are about to end
    if patient and len(present) < largest and not any(notice.ended or notice.running for notice in present.values()):
        return None
    chosen = sorted(present)[: max(sizes)]
    members = tuple((member, present[member].session) for member in chosen)
    return Plan(1 if current is None else current.number + 1, members, present[chosen[0]].address)


def _takes_part(notice: Notice | None, session: str, plan: Plan) -> bool:
    return notice is not None and notice.session == session and notice.ended < plan.number


class Rendezvous:
    """This node's part in the rendezvous: writes its file and reads the others', in a thread.

    Args:
      folder: directory that all nodes share and only this user can write in; made if it is absent.
      rank: index of this node, below `largest`.
      address: HOST:PORT of this node that the others can reach.
      smallest: least number of nodes that the run may use.
      largest: number of all nodes.
      gather_seconds: how long the first start waits for all nodes.
      lost_seconds: silence after which a node counts as lost.

    Raises:
      ConfigError: the folder cannot be written, or other users can write in it.
      JaxstackError: its disk is full.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        address: str,
        smallest: int,
        largest: int,
        *,
        gather_seconds: float = 60.0,
        lost_seconds: float = 10.0,
    ):
        self.folder = folder
        self.rank = rank
        self.smallest = smallest
        self.largest = largest
        self._lost_seconds = lost_seconds
        self._patient_until = time.monotonic() + gather_seconds
        self._own = Notice(uuid.uuid4().hex[:12], address, bounds=(smallest, largest))
        self._seen: dict[int, tuple[tuple[str, int], float]] = {}
        self._others: dict[int, Notice] = {}
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._over = False
        self._handle = _open_own(folder, self._path(rank))
        self._look()  # a file that an earlier launcher left behind does not count: it does not change
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def meet(self, stopped: Callable[[], bool], say: Callable[[str], None]) -> Nodes | int | None:
        """Wait until enough nodes are ready, and return this node's place among them.

        Args:
          stopped: called several times a second.
          say: reports a message, if the wait is long.

        Returns:
          The place; the exit code 0 or 2 if the run ended on the other nodes with it; None if `stopped` returned True.

        Raises:
          ConfigError: another launcher has another range of nodes.
        """
        told = time.monotonic()
        while not stopped():
            with self._lock:
                self._propose()
                notices = self.notices()
                self._check_bounds(notices)
                codes = {notice.left for notice in notices.values()}
                if 0 in codes or (2 in codes and not self._own.trained):
                    return 0 if 0 in codes else 2
                plan = newest_plan(notices)
                if plan is not None and self._me in plan.members and plan.number > self._own.ended:
                    if plan != self._own.plan:
                        self._write(plan=plan)
                    if self._all_adopted(plan):
                        self._write(running=True)
                        return Nodes(len(plan.members), plan.members.index(self._me), plan.coordinator)
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                say(self._describe_wait(notices, plan))
            time.sleep(_LOOK_SECONDS)
        return None

    def change(self) -> Change | None:
        """Return why the processes that run must end: a member failed, or nodes joined; None if nothing has changed."""
        with self._lock:
            self._propose()
            plan = self._own.plan
            notices = self.notices()
            if plan is None or not self._own.running:
                return None
            for rank, session in plan.members:
                notice = notices.get(rank)
                if notice is not None and notice.session != session:
                    return Change(f"the launcher of node {rank} was started anew", can_save=False)
                # Those of a node that was stopped by a signal have saved together with all others, which end too.
                if notice is not None and notice.left is None and notice.ended >= plan.number:
                    return Change(f"the processes of node {rank} have ended", can_save=False)
            newest = newest_plan(notices)
            if newest is None or newest.number <= plan.number:
                return None
            joined = sorted({rank for rank, _ in newest.members} - {rank for rank, _ in plan.members})
            return Change(f"node {_list(joined)} joined" if joined else "the nodes changed", can_save=True)

    def ended(self, *, trained: bool) -> None:
        """Tell the others that this node's processes have ended, or do not run for another reason.

        Args:
          trained: they have taken a step.
        """
        with self._lock:
            plan = self._own.plan
            if plan is None:
                return
            sizes = {*self._own.trained, len(plan.members)} if trained else self._own.trained
            self._write(running=False, ended=plan.number, trained=tuple(sorted(sizes)))

    def refuse(self, size: int) -> bool:
        """Note that the run's configuration does not allow `size` nodes; return False if the number is not the cause.

        The number is tried again once one of these nodes has another launcher. It is not the cause if all nodes take
        part, and the run has never trained with fewer.
        """
        with self._lock:
            if size == self.largest and not set(self._own.trained) - {size}:
                return False
            members = self._own.plan.members if self._own.plan else ()
            self._write(unfit=(*self._own.unfit, members))
            return True

    def leave(self, code: int) -> None:
        """Tell the others that this launcher ends, with an exit code: the run is done, or was stopped here."""
        with self._lock:
            if self._own.left is None:
                self._write(left=code)

    def others_stopped_it(self) -> bool:
        """Return True if the present start was ended by another node: a member leaves after a signal, or nodes join."""
        time.sleep(2 * _BEAT_SECONDS)  # until its last notice is read
        with self._lock:
            plan = self._own.plan
            if plan is None:
                return False
            newest = newest_plan(self.notices())
            leaves = any(self._others[rank].left is not None for rank, _ in plan.members if rank in self._others)
            return leaves or (newest is not None and newest.number > plan.number)

    def close(self) -> None:
        """Write the last notice, and end the thread that shows that this launcher lives."""
        self._over = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)  # a file system that hangs holds it

    def notices(self) -> dict[int, Notice]:
        """Return the notices of all nodes whose launchers are alive, this one too, by rank."""
        now = time.monotonic()
        alive = {rank for rank, (_, at) in self._seen.items() if now - at < self._lost_seconds}
        return {self.rank: self._own} | {rank: self._others[rank] for rank in alive}

    @property
    def _me(self) -> tuple[int, str]:
        return self.rank, self._own.session

    def _check_bounds(self, notices: Mapping[int, Notice]) -> None:
        """Raise ConfigError if another launcher has another range; a run that has trained goes on without that one."""
        for rank, notice in () if self._own.trained else notices.items():
            if notice.left is None and notice.bounds != self._own.bounds:
                own, other = (f"{least}:{most}" for least, most in (self._own.bounds, notice.bounds))
                raise ConfigError(
                    f"node {rank} was started with --nodes {other}, and node {self.rank} with --nodes {own}; start all "
                    "launchers of a run with the same range."
                )

    def _describe_wait(self, notices: Mapping[int, Notice], plan: Plan | None) -> str:
        present = sorted(rank for rank, notice in notices.items() if notice.left is None)
        if plan is not None and self._me not in plan.members and all(rank in present for rank, _ in plan.members):
            return f"waiting as a spare: the run uses node {_list([rank for rank, _ in plan.members])}"
        return (
            f"waiting for other nodes: {_list(present)} of 0..{self.largest - 1} are present; the run needs at least "
            f"{self.smallest} nodes, and a number that its layout allows"
        )

    def _all_adopted(self, plan: Plan) -> bool:
        notices = self.notices()
        return all(rank in notices and notices[rank].plan == plan for rank, _ in plan.members)

    def _propose(self) -> None:
        patient = time.monotonic() < self._patient_until
        plan = propose(self.notices(), self.rank, self.smallest, self.largest, patient=patient)
        if plan is not None:
            self._write(proposed=plan)

    def _path(self, rank: int) -> Path:
        return self.folder / f"node-{rank}"

    def _write(self, **changes: object) -> None:
        """Change this node's notice. The thread writes it: a file system that hangs must not hold the caller."""
        self._own = dataclasses.replace(self._own, **changes)  # type: ignore[arg-type]
        self._wake.set()

    def _beat(self) -> None:
        over = False
        while not over:
            self._wake.wait(_BEAT_SECONDS)
            self._wake.clear()
            over = self._over
            with self._lock:
                self._own = dataclasses.replace(self._own, beat=self._own.beat + 1)
                line = json.dumps(dataclasses.asdict(self._own)).encode()
            with contextlib.suppress(OSError):  # then this node falls silent
                os.pwrite(self._handle, line, 0)  # in place: clients of NFS may keep a name's old file for a minute
                os.ftruncate(self._handle, len(line))
                os.fsync(self._handle)
            self._look()
        os.close(self._handle)

    def _look(self) -> None:
        """Read the other nodes' files; one that has changed is a sign of life of its launcher."""
        for rank in set(range(self.largest)) - {self.rank}:
            notice = _read_notice(self._path(rank))
            if notice is None:
                continue
            mark = (notice.session, notice.beat)
            with self._lock:
                before = self._seen.get(rank)
                if before is None:
                    self._seen[rank] = mark, -math.inf
                elif before[0] != mark:
                    self._seen[rank] = mark, time.monotonic()
                self._others[rank] = notice


def _open_own(folder: Path, path: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(f"other users can write in {folder} (--rendezvous); give a new folder, which is made.")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise cannot_write(f"the folder {folder} (--rendezvous)", error) from None


def _read_notice(path: Path) -> Notice | None:
    """Return what a node's file says; None if there is none, or it is being written."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        plans = {name: _plan_of(fields[name]) for name in ("plan", "proposed")}
        unfit = tuple(map(_members_of, fields["unfit"]))
        tuples = {name: tuple(fields[name]) for name in ("trained", "bounds")}
        return Notice(**{**fields, **plans, **tuples, "unfit": unfit})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _plan_of(fields: Mapping | None) -> Plan | None:
    if fields is None:
        return None
    return Plan(fields["number"], _members_of(fields["members"]), fields["coordinator"])


def _members_of(fields: Sequence[Sequence]) -> Members:
    return tuple((rank, session) for rank, session in fields)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
