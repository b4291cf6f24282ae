"""Copies of a run's state in host memory, on its own node and on a neighbour's, which outlive its processes.

Every so many steps each process copies its shards to host memory. Beside the next steps a thread writes them, with
hashes, to the folder of its launcher (`memory_folder`), and sends the files to the process that holds its second copy
(`neighbour`). An older copy is deleted when all processes have both copies of the newer one, so that at any moment
there is a step of which all shards are complete. At a restart the processes agree on the newest such step.
"""

import collections
import dataclasses
import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jaxstack.checkpoint import manifest, memory_folder, shard_files
from jaxstack.checkpoint.commit import make_index
from jaxstack.checkpoint.leaves import LeafSpec, compare, describe, name_leaves, orbax_target, restored_leaf, to_stored
from jaxstack.checkpoint.neighbour import CopyClient, CopyServer, TransferError, find_holders, local_address
from jaxstack.distributed import coordination
from jaxstack.distributed.cluster import check_tls_files, find_place
from jaxstack.distributed.device_setup import host_memory
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.observe.number_format import byte_size

_GENERATIONS = 2
"""Copies of a state that are in memory at the same time: the complete one and the one that is being written."""
_opened = itertools.count()


@dataclasses.dataclass(frozen=True)
class Member:
    """A process as the others know it after the start: its node and server, the size of its shards, its copies."""

    node: str
    num_bytes: int
    free_bytes: int
    """Room in its node's host memory for copies, those that are there now included."""
    own: Sequence[int]
    held: Mapping[str, Sequence[int]]
    """Process -> steps of its second copies on this node."""
    address: Sequence[Any] = ()
    """(host, port) of its server; empty without one."""
    token: str = ""


def needed_bytes(members: Sequence[Member]) -> dict[str, int]:
    """Return for each node the most bytes that copies take in its host memory: own and second ones, two of each."""
    needed = collections.Counter[str]()
    for member in members:
        needed[member.node] += _GENERATIONS * member.num_bytes
    if len(members) > 1:
        for rank, holder in enumerate(find_holders([member.node for member in members])):
            needed[members[holder].node] += _GENERATIONS * members[rank].num_bytes
    return dict(needed)


def check_room(members: Sequence[Member]) -> None:
    """Check that every node has room for the copies that its processes make and hold.

    Raises:
      ConfigError: a node has not; the message has the numbers.
    """
    for node, needed in needed_bytes(members).items():
        free = min(member.free_bytes for member in members if member.node == node)
        if needed > free:
            host, _, folder = node.partition(":")
            raise ConfigError(
                f"copies in memory (checkpoint.memory_every_steps) take up to {byte_size(needed)} in {folder} on "
                f"{host}, {_GENERATIONS} of each state that the node has or holds; it has {byte_size(free)}. Make that "
                "file system larger (mount -o remount,size=..., docker run --shm-size), shard the state over more "
                "nodes, or set checkpoint.memory_every_steps to 0."
            )


def common_steps(members: Sequence[Member]) -> list[int]:
    """Return the steps, newest first, of which every process's state is in the memory of some node."""
    found = [
        {*member.own, *(step for other in members for step in other.held.get(str(rank), ()))}
        for rank, member in enumerate(members)
    ]
    return sorted(set.intersection(*found), reverse=True)


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
        self._own = memory_folder.own_copies(self._folder, self._rank)
        self._answers = itertools.count()
        self._thread: threading.Thread | None = None
        self._tls: Sequence[str] | None = None
        self._server = self._serve()
        self._members = self._meet()
        self._client = self._reach_holder()
        self.newest = -1
        """Step of the newest copy that all processes have; -1: none."""
        self.blocked_seconds = 0.0
        """Time that copies have held up the caller."""
        self.sources = ""
        """Numbers of processes whose copy was their own and a neighbour's, such as `own 1, neighbour 1`; "" before."""

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

    def copy(self, step: int, state: PyTree, extra: object, files: Mapping[str, bytes] | None = None) -> None:
        """Start to copy the state after `step` steps, `extra` (plain JSON) and further files to memory.

        Waits for the copy before, so that there are never more than two. Afterwards the state may be donated.
        """
        began = time.monotonic()
        self.wait()
        leaves, _ = name_leaves(state)
        specs = {name: describe(name, leaf) for name, leaf in leaves.items()}
        index = {**make_index(step, specs, extra), "run": self._run, "processes": self._count}
        arrays = {name: to_stored(leaves[name], spec) for name, spec in specs.items() if spec.has_array}
        shards = shard_files.start_copy(arrays)
        self._thread = threading.Thread(target=self._finish, args=(step, shards, index, files or {}), daemon=True)
        self._thread.start()
        self.blocked_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Wait until the copy in progress, if any, is complete on all processes or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def latest_step(self, at_least: int) -> int | None:
        """Return the newest step, `at_least` or later, of which all processes have an intact copy of their shards.

        A copy of this process that is missing or damaged is replaced by the one that another process holds. What is
        damaged or does not fit this run is reported.
        """
        steps = [step for step in common_steps(self._members) if step >= at_least]
        if not steps and any(step >= at_least for member in self._members for step in member.own):
            self._report(
                "copies in memory are incomplete: of no step are all shards left; the checkpoint on disk is used"
            )
        for step in steps:
            source, notes = self._find_intact(step)
            name = f"{self._name}-{next(self._answers)}"
            answers = coordination.all_gather(name, [source, notes], self._timeout_seconds)
            for note in dict.fromkeys(note for _, told in answers for note in told):
                self._report(note)
            sources = collections.Counter(source for source, _ in answers)
            if not sources[None]:
                self.sources = f"own {sources['own']}, neighbour {sources['neighbour']}"
                return step
        return None

    def extra(self, step: int) -> Any:
        """Return the extra data of the copy of `step`."""
        return manifest.read_index(self._own.path(step)).get("extra")

    def read_file(self, step: int, name: str) -> bytes | None:
        """Return the content of a file that was given to `copy`; None if there is none."""
        path = self._own.path(step)
        return (path / name).read_bytes() if name in manifest.read_index(path)["files"] else None

    def restore(self, step: int) -> PyTree:
        """Return the state of the copy of `step`, which `latest_step` returned."""
        root = self._own.path(step)
        index = manifest.read_index(root)
        wanted, structure = name_leaves(self._abstract)
        stored = _specs_of(index)
        loaded = shard_files.read(root, index, _targets(wanted, stored))
        return structure.unflatten(
            [restored_leaf(name, loaded.get(name), leaf, stored[name]) for name, leaf in wanted.items()]
        )

    def keep(self, step: int | None) -> None:
        """Delete all copies but that of `step`, which the run goes on from; None: all."""
        self.newest = -1 if step is None else step
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
        held = {str(rank): self._held(rank).steps() for rank in memory_folder.held_ranks(self._folder)}
        own = Member(
            node=f"{socket.gethostname()}:{self._folder}",
            num_bytes=shard_files.local_bytes(
                {name: orbax_target(leaf, describe(name, leaf)) for name, leaf in targets.items()}
            ),
            free_bytes=_room(self._folder),
            own=self._own.steps(),
            held=held,
            address=self._server.address if self._server is not None else (),
            token=self._server.token if self._server is not None else "",
        )
        members = [Member(**told) for told in coordination.all_gather(self._name, dataclasses.asdict(own))]
        check_room(members)
        return members

    def _held(self, rank: int) -> memory_folder.Copies:
        return memory_folder.held_copies(self._folder, rank)

    def _reach_holder(self) -> CopyClient | None:
        if self._server is None:
            return None
        return self._client_of(find_holders([member.node for member in self._members])[self._rank])

    def _client_of(self, holder: int) -> CopyClient:
        host, port = self._members[holder].address
        return CopyClient(self._rank, (host, port), self._members[holder].token, self._tls)

    def _find_intact(self, step: int) -> tuple[str | None, list[str]]:
        """Make this process's copy of `step` an intact one; return its source, `own` or `neighbour`, and messages.

        The source is None if there is no intact copy that fits this run.
        """
        notes = []
        for source, obtain in self._copies_of(step):
            try:
                index = manifest.check(obtain(), step)
            except (manifest.Damaged, OSError, JaxstackError) as error:
                whose = "its own" if source == "own" else "its neighbour's"
                notes.append(
                    f"the copy of step {step} of process {self._rank} in {whose} memory cannot be used and is passed "
                    f"over: {error}"
                )
                continue
            if misfit := self._misfit(index):
                return None, [*notes, f"the copies of step {step} in memory do not fit this run: {misfit}"]
            return source, notes
        return None, notes

    def _copies_of(self, step: int) -> list[tuple[str, Callable[[], Path]]]:
        """Return the copies of this process's state of `step`: source, and function that returns the folder."""
        found: list[tuple[str, Callable[[], Path]]] = []
        if step in self._members[self._rank].own:
            found.append(("own", lambda: self._own.path(step)))
        holder = next((h for h, m in enumerate(self._members) if step in m.held.get(str(self._rank), ())), None)
        if holder is not None:
            found.append(("neighbour", lambda: self._fetch(step, holder)))
        return found

    def _fetch(self, step: int, holder: int) -> Path:
        self._client_of(holder).fetch(self._own.begin(step), step)
        return self._own.commit(step)

    def _misfit(self, index: Mapping[str, Any]) -> str | None:
        """Return why the copy with this index cannot be restored in this run; None if it can."""
        if index["run"] != self._run:
            return f"they are of {index['run']}"
        if index["processes"] != self._count:
            return f"they are of {index['processes']} processes, this run has {self._count}"
        wanted, _ = name_leaves(self._abstract)
        stored = _specs_of(index)
        if differences := compare({name: describe(name, leaf) for name, leaf in wanted.items()}, stored):
            return differences[0]
        missing = shard_files.missing_shard(index, _targets(wanted, stored))
        return f"another layout, without {missing}" if missing else None

    def _finish(self, step: int, shards: shard_files.Shards, index: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Write the copy, send it, and, when all processes have, delete the older one; runs in a thread."""
        name = f"{self._name}-copy-{step}"
        failure = None
        try:
            shard_files.write(self._own.begin(step), shards, index, files)
            root = self._own.commit(step)
            if self._client is not None:
                self._client.send(root, step)
        except Exception as error:
            failure = f"process {self._rank}: {getattr(error, 'strerror', None) or error}"
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

    def _agree(self, name: str, failure: str | None) -> str | None:
        """Return the failure of some process, or None if all have finished their copy."""
        if self._count == 1:
            return failure
        if failure is not None:
            coordination.publish(name, failure)
        coordination.barrier(name, self._timeout_seconds)
        return coordination.try_read(name)

    def _keep(self, steps: Sequence[int]) -> None:
        self._own.keep(steps)
        if self._client is None:
            return
        try:
            self._client.keep(steps)
        except TransferError as error:
            self._report(f"an old copy in memory could not be deleted: {error}")


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
