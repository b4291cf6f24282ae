"""Copies of a run's state in host memory, on its own node and on a neighbour's, which outlive its processes.

Every so many steps each process copies its shards to host memory, by way of a copy on the devices if they have room.
Beside the next steps threads write them, with hashes, to the folder of its launcher (`memory_folder`), and send each
file, once it is written, to the process that holds its second copy (`neighbour`). An older copy is deleted when all
processes have both copies of the newer one, so that at any moment there is a step of which all shards are complete. At
a restart the processes agree on the newest such step; where their number or layout has changed, they put their shards
together from the copies of several processes (`other_layout`).
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxstack.checkpoint import manifest, memory_folder, shard_files
from jaxstack.checkpoint.commit import make_index
from jaxstack.checkpoint.leaves import LeafSpec, compare, describe, name_leaves, orbax_target, restored_leaf, to_stored
from jaxstack.checkpoint.memory_folder import Part
from jaxstack.checkpoint.neighbour import (
    CopyClient,
    CopyServer,
    Location,
    Member,
    TransferError,
    check_room,
    find_holders,
    known_copies,
    locate,
    needed_bytes,
)
from jaxstack.checkpoint.other_layout import PartCopy, gather, passed_over
from jaxstack.distributed import coordination
from jaxstack.distributed.cluster import check_tls_files, find_place, local_address
from jaxstack.distributed.device_setup import host_memory
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.observe.number_format import byte_size

_opened = itertools.count()


class MemoryCheckpoints:
    """Copies a run's state to host memory, and restores it from there after a failure.

    All processes make the same calls.

    Args:
      every_steps: interval of the copies.
      run_dir: directory of the run; copies of another run are not used.
      abstract_state: shapes, dtypes and shardings of the state.
      report: prints a message.
      timeout_minutes: limit on the time until all processes have finished a copy.

    Raises:
      ConfigError: the process was not started by the launcher, or a node's memory has no room for the copies.
    """

    def __init__(
        self,
        every_steps: int,
        run_dir: Path,
        abstract_state: PyTree,
        *,
        report: Callable[[str], None],
        timeout_minutes: int = 120,
    ):
        self._every_steps = every_steps
        self._run = str(run_dir.absolute())
        self._abstract = abstract_state
        self._report = report
        self._timeout_seconds = 60 * timeout_minutes
        self._name = f"memory-{next(_opened)}"
        self._rank, self._count = coordination.process_position()
        self._folder = _launcher_folder()
        self._part = Part(self._rank, self._count)
        self._own = memory_folder.own_copies(self._folder, self._part)
        self._thread: threading.Thread | None = None
        self._on_devices: bool | None = None
        """True if the devices' memory has room for a copy of the state, which is then made there first; None before the
        first copy."""
        self._off_devices = threading.Event()
        """Set unless a copy may be on the devices."""
        self._off_devices.set()
        self._told_to_wait = False
        self._tls: Sequence[str] | None = None
        self._server = self._serve()
        self._members = self._meet()
        self._holders = find_holders([member.node for member in self._members])
        self._client = self._client_of(self._holders[self._rank]) if self._server is not None else None
        self._source: Sequence[shard_files.Folder] = ()
        """The folders that `latest_step` has found to restore from."""
        self.newest = -1
        """Step of the newest copy that all processes have; -1: none."""
        self.blocked_seconds = 0.0
        """Time that copies have held up the caller."""
        self.sources = ""
        """Numbers of processes by where their copy was, such as `own 1, neighbour 1`; "" before."""

    def __enter__(self) -> "MemoryCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            return  # waiting for the others could block forever; the threads end with the process
        self.wait()
        if self._server is not None:
            self._server.close()

    def describe(self) -> str:
        """Return one line about the interval and size of the copies."""
        largest = max(member.num_bytes for member in self._members)
        needed = needed_bytes(self._members)
        node = max(needed, key=lambda name: needed[name])
        free = min(member.free_bytes for member in self._members if member.node == node)
        where = {True: "on another node", False: "on the same node"}[len(needed) > 1]
        second = f", with second copies {where}" if self._count > 1 else ""
        return (
            f"copies in memory every {self._every_steps} steps{second}: {byte_size(largest)} a process, "
            f"up to {byte_size(needed[node])} of the {byte_size(free)} that a node has in {memory_folder.SHARED_MEMORY}"
        )

    def is_due(self, step: int) -> bool:
        """Return True if a copy is due after `step` steps."""
        return step > 0 and step % self._every_steps == 0

    def figures(self) -> dict[str, float]:
        """Return values for a line of metrics: newest copied step, bytes of the whole state, seconds blocked so far."""
        return {
            "memory_copy_step": self.newest,
            "memory_copy_bytes": sum(member.num_bytes for member in self._members),
            "memory_copy_seconds": self.blocked_seconds,
        }

    def copy(
        self,
        step: int,
        state: PyTree,
        extra: object,
        files: Mapping[str, bytes] | None = None,
        *,
        steps_grow: bool = False,
    ) -> None:
        """Start to copy a state to memory.

        Waits for the copy before, so that there are never more than two. Afterwards the state may be donated: it is
        copied within the devices' memory first, if steps leave room for that, so that they do not wait for the host.

        Args:
          step: number of steps after which it is the state.
          state: the state.
          extra: plain JSON.
          files: further files, name -> content.
          steps_grow: later steps need more device memory than those so far, which then do not show what is left.
        """
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        if waited > 1 and not self._told_to_wait:
            self._told_to_wait = True
            self._report(
                f"a copy in memory takes longer than {self._every_steps} steps, and the run has waited {waited:.1f} s "
                "for it: raise checkpoint.memory_every_steps."
            )
        leaves, _ = name_leaves(state)
        specs = {name: describe(name, leaf) for name, leaf in leaves.items()}
        index = {**make_index(step, specs, extra), "run": self._run}
        arrays = {name: to_stored(leaves[name], spec) for name, spec in specs.items() if spec.has_array}
        if self._on_devices is None and not steps_grow:
            # Only now: the copies themselves count in what the devices have needed so far.
            self._on_devices = shard_files.has_room(arrays)
        try:
            shards = self._start_copy(arrays)
        except jax.errors.JaxRuntimeError as error:  # no host memory: the thread tells the other processes
            shards = error
        self._thread = threading.Thread(target=self._finish, args=(step, shards, index, files or {}), daemon=True)
        self._thread.start()
        self.blocked_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Wait until the copy in progress, if any, is complete on all processes or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def leave_devices(self) -> None:
        """Wait until no copy is on the devices, before a program that may need more of their memory than the steps."""
        began = time.monotonic()
        self._off_devices.wait()
        self.blocked_seconds += time.monotonic() - began

    def latest_step(self, at_least: int) -> int | None:
        """Return the newest step, `at_least` or later, of which all processes have found their shards in intact copies.

        A copy of this process that is missing or damaged is replaced by the one that another node holds. If the copies
        are of another number of processes, or of another layout, the shards are put together from several. What is
        damaged or does not fit this run is reported.
        """
        known = [made for made in known_copies(self._members, self._count) if made[0] >= at_least]
        notes: dict[str, None] = {}
        lacking: list[str] = []
        for step, count in known:
            found = coordination.all_gather("memory-found", [*self._find_intact(step, count)], self._timeout_seconds)
            answers = [_Found(*answer) for answer in found]
            new = dict.fromkeys(note for answer in answers for note in answer.notes)
            for note in new:
                self._report(note)
            notes |= new
            sources = collections.Counter(answer.source for answer in answers)
            if not sources[None]:
                others = f", other layout {sources['others']}" if sources["others"] else ""
                self.sources = f"own {sources['own']}, neighbour {sources['neighbour']}{others}"
                return step
            lacking = [f"step {step} lacks {answer.missing}" for answer in answers if answer.missing]
        if lacking and not notes:
            self._report(
                "copies in memory are incomplete: of no step are all shards left"
                f"; {lacking[0]}; the checkpoint on disk is used"
            )
        return None

    def extra(self, step: int) -> Any:
        """Return the extra data of the copy of `step`, which `latest_step` returned."""
        return self._source[0].index.get("extra")

    def read_file(self, step: int, name: str) -> bytes | None:
        """Return the content of a file that was given to `copy`; None if there is none.

        This process's copy is read first, and then all on this node, of other processes too: files of one name must be
        equal, or be given by one process only, unless every process gives one.
        """
        near = [copies.path(step) for copies in memory_folder.all_copies(self._folder).values()]
        for root in [self._source[0].root, *near]:
            with contextlib.suppress(manifest.Damaged, ConfigError):
                index = manifest.check(root, step, names=(name,))
                if index.get("run") == self._run and name in index["files"]:
                    return (root / name).read_bytes()
        return None

    def restore(self, step: int) -> PyTree:
        """Return the state of the copy of `step`, which `latest_step` returned."""
        wanted, structure = name_leaves(self._abstract)
        stored = _specs_of(self._source[0].index)
        loaded = shard_files.read(self._source, _targets(wanted, stored))
        return structure.unflatten(
            [restored_leaf(name, loaded.get(name), leaf, stored[name]) for name, leaf in wanted.items()]
        )

    def keep(self, step: int | None) -> None:
        """Delete all copies but that of `step`, which the run goes on from; None: all. Call this after restoring."""
        self.newest = -1 if step is None else step
        self._source = ()
        shutil.rmtree(self._fetched, ignore_errors=True)
        self._keep([] if step is None else [step])

    def discard_newer(self, step: int) -> None:
        """Delete all copies after `step`, when the run goes back to that step."""
        self.wait()
        kept = [copied for copied in self._own.steps() if copied <= step]
        self.newest = max(kept, default=-1)
        self._keep(kept)

    def _serve(self) -> CopyServer | None:
        """Start this process's server, if there are other processes."""
        place = find_place()
        if place is None or self._count == 1:
            return None
        self._tls = check_tls_files(place.coordinator)
        try:
            return CopyServer(self._folder, local_address(place.coordinator), self._tls)
        except OSError as error:
            raise JaxstackError(
                f"process {self._rank} cannot listen for copies in memory: {error.strerror or error}; "
                "checkpoint.memory_every_steps=0 does without them."
            ) from None

    def _meet(self) -> list[Member]:
        """Exchange what all processes have, and check that there is room."""
        targets = {
            name: leaf
            for name, leaf in name_leaves(self._abstract)[0].items()
            if (spec := describe(name, leaf)).has_array and not spec.dtype.startswith("key<")
        }
        own = Member(
            node=f"{socket.gethostname()}:{self._folder}",
            num_bytes=shard_files.local_bytes(
                {name: orbax_target(leaf, describe(name, leaf)) for name, leaf in targets.items()}
            ),
            free_bytes=_room(self._folder),
            copies={place: copies.steps() for place, copies in memory_folder.all_copies(self._folder).items()},
            address=self._server.address if self._server is not None else (),
            token=self._server.token if self._server is not None else "",
        )
        members = [Member(**told) for told in coordination.all_gather("memory-members", dataclasses.asdict(own))]
        check_room(members)
        return members

    def _client_of(self, member: int) -> CopyClient:
        host, port = self._members[member].address
        return CopyClient((host, port), self._members[member].token, self._tls)

    def _is_near(self, member: int) -> bool:
        """Return True if a process is on this node, whose folder this process reads without the network."""
        return self._members[member].node == self._members[self._rank].node

    @property
    def _fetched(self) -> Path:
        return memory_folder.fetched_folder(self._folder, self._rank)

    def _find_intact(self, step: int, count: int) -> "_Found":
        """Find this process's shards of `step` in the copies that a start with `count` processes made."""
        located = locate(self._members, step, count)
        notes: list[str] = []
        intact = None
        try:
            for source, place, obtain in self._copies_of(step, located.get(self._part, ())):
                try:
                    root = obtain()
                    index = manifest.check(root, step)
                except (manifest.Damaged, OSError, JaxstackError) as error:
                    notes.append(passed_over(step, self._part, place, error))
                    continue
                files, missing = shard_files.find_files([index], self._targets_of(index))
                if missing is None:
                    self._source = [shard_files.Folder(root, index, files[0])]
                    return _Found(source, notes)
                intact = root
                break
            found = gather(self._parts(step, located, intact), step, self._targets_of)
        except _Misfit as error:
            return _Found(None, [*notes, f"the copies of step {step} in memory do not fit this run: {error}"])
        self._source = found.folders
        notes = list(dict.fromkeys([*notes, *found.notes]))
        return _Found("others" if found.folders else None, notes, found.missing)

    def _copies_of(self, step: int, locations: Sequence[Location]) -> list[tuple[str, str, Callable[[], Path]]]:
        """Return the copies of this process's own part: source, place, and function that returns the folder."""
        found: list[tuple[str, str, Callable[[], Path]]] = []
        for member, place in locations:
            if self._is_near(member) and place == f"own/{self._part}":
                found.insert(0, ("own", place, lambda: self._own.path(step)))
            elif self._server is not None:
                found.append(("neighbour", place, partial(self._fetch, step, member, place)))
        return found

    def _fetch(self, step: int, member: int, place: str) -> Path:
        self._client_of(member).fetch(place, step, self._own.begin(step))
        return self._own.commit(step)

    def _parts(self, step: int, located: Mapping[Part, Sequence[Location]], intact: Path | None) -> list[PartCopy]:
        """Return all copies of `step` that this process can read, those of its own node first.

        Args:
          step: the step.
          located: where the copies of each part are.
          intact: a whole copy of this process's own part, if one was found; no other copy of that part is then needed.
        """
        shutil.rmtree(self._fetched, ignore_errors=True)
        found = [] if intact is None else [PartCopy(self._part, f"own/{self._part}", intact)]
        for part, locations in located.items():
            for member, place in locations if intact is None or part != self._part else ():
                if self._is_near(member):
                    found.append(PartCopy(part, place, memory_folder.Copies(self._folder / place).path(step)))
                elif self._server is not None:
                    root = self._fetched / f"{member}-{place.replace('/', '-')}"
                    fetch = partial(self._client_of(member).fetch_files, place, step, root)
                    found.append(PartCopy(part, place, root, fetch))
        return sorted(found, key=lambda copy: copy.fetch is not None)

    def _targets_of(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays to read from copies with this index; raise _Misfit if they are not of this run's state."""
        if index["run"] != self._run:
            raise _Misfit(f"they are of {index['run']}")
        wanted, _ = name_leaves(self._abstract)
        stored = _specs_of(index)
        if differences := compare({name: describe(name, leaf) for name, leaf in wanted.items()}, stored):
            raise _Misfit(differences[0])
        return _targets(wanted, stored)

    def _start_copy(self, arrays: Mapping[str, Any]) -> shard_files.Shards:
        """Start to copy arrays, on the devices first if they have room, otherwise to host memory."""
        if self._on_devices:
            self._off_devices.clear()
            try:
                return shard_files.start_copy(arrays, on_device=True)
            except jax.errors.JaxRuntimeError:  # no room after all, such as in one piece
                self._on_devices = False
                self._off_devices.set()
        return shard_files.start_copy(arrays)

    def _finish(
        self, step: int, shards: shard_files.Shards | Exception, index: dict[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Write and send the copy, and, when all processes have, delete the older one; runs in a thread.

        Args:
          step, index, files: of the copy.
          shards: this process's; an exception if they could not be copied, so that all processes drop this copy.
        """
        name = f"{self._name}-copy-{step}"
        failure = None
        try:
            if isinstance(shards, Exception):
                raise shards
            self._write(step, shards, index, files)
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError):  # the devices may have had no room after all
                self._on_devices = False
            failure = f"process {self._rank}: {_reason(error)}"
        try:
            failure = self._agree(name, failure)
        except (JaxstackError, RuntimeError):
            return  # another process died, and this one will end; the copy before is complete
        if failure is None:
            self.newest = step
            self._keep([step])
        else:
            self._report(f"the copy of step {step} in memory failed and is dropped: {failure}")
            self._keep([self.newest] if self.newest >= 0 else [])

    def _write(self, step: int, shards: shard_files.Shards, index: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Write the copy, and send each file once it is written.

        Once all are written the copy counts here, and only then does this wait for the files that are still to be sent.
        Nothing of it is left on the devices then, nor if writing fails.
        """
        with contextlib.ExitStack() as stack:
            try:
                root = self._own.begin(step)
                if self._client is None:
                    shard_files.write(root, shards, index, files)
                else:
                    send = stack.enter_context(self._client.sending(self._part, root, step))
                    shard_files.write(root, shards, index, files, send)
            finally:
                shards.clear()
                self._off_devices.set()
            self._own.commit(step)

    def _agree(self, name: str, failure: str | None) -> str | None:
        """Return the failure of some process, or None if all have finished their copy."""
        if self._count == 1:
            return failure
        if failure is not None:
            coordination.publish(name, failure)
        coordination.barrier(name, self._timeout_seconds)
        return coordination.try_read(name)

    def _keep(self, steps: Sequence[int]) -> None:
        """Delete all copies but those of `steps`: this process's two, and those of earlier starts on this node."""
        self._own.keep(steps)
        written = {f"own/{Part(rank, self._count)}" for rank in range(self._count) if self._is_near(rank)}
        written |= {
            f"neighbour/{Part(rank, self._count)}" for rank, holder in enumerate(self._holders) if self._is_near(holder)
        }
        for place, copies in memory_folder.all_copies(self._folder).items():
            if place not in written:
                copies.keep(steps)
        if self._client is None:
            return
        try:
            self._client.keep(self._part, steps)
        except TransferError as error:
            self._report(f"an old copy in memory could not be deleted: {error}")


class _Found(NamedTuple):
    """Result of a process's search for its shards of one step in the copies in memory."""

    source: str | None
    """`own`, `neighbour`, or `others` for copies of several processes; None: not all shards are there."""
    notes: list[str]
    """Messages about copies that were passed over."""
    missing: str | None = None
    """The first shard of which no copy is left."""


class _Misfit(Exception):
    """Raised if copies in memory are of another run, or of another state than this run's."""


def _reason(error: Exception) -> str:
    """Return in one line why a copy failed."""
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__


def _launcher_folder() -> Path:
    folder = os.environ.get(memory_folder.VARIABLE)
    if not folder or not os.path.isdir(folder):
        raise ConfigError(
            "checkpoint.memory_every_steps needs the launcher, which keeps the copies in memory while it restarts a "
            f"process, and a file system in memory ({memory_folder.SHARED_MEMORY}): start the run with "
            "python -m jaxstack.launch -- COMMAND, or set checkpoint.memory_every_steps to 0."
        )
    return Path(folder)


def _room(folder: Path) -> int:
    """Return the bytes that copies may take in a folder in memory: its file system's, within those of the host."""
    room = shutil.disk_usage(folder).free + memory_folder.used_bytes(folder)
    return min(room, host_memory() or room)


def _specs_of(index: Mapping[str, Any]) -> dict[str, LeafSpec]:
    return {name: LeafSpec.from_json(fields) for name, fields in index["leaves"].items()}


def _targets(wanted: Mapping[str, Any], stored: Mapping[str, LeafSpec]) -> dict[str, Any]:
    """Return the arrays to read, as `orbax_target`, of a wanted state."""
    return {name: orbax_target(leaf, stored[name]) for name, leaf in wanted.items() if stored[name].has_array}
