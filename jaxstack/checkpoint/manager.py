"""Saves and restores pytrees: asynchronously, with file hashes, committed in one rename, onto any mesh."""

import atexit
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jaxstack.checkpoint import arrays, directory, manifest
from jaxstack.checkpoint.commit import (
    DamageFinder,
    DeletionCheck,
    SaveJob,
    commit,
    explain,
    finish_together,
    make_index,
)
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.directory import should_save, steps_to_delete
from jaxstack.checkpoint.leaves import (
    LeafSpec,
    check_layout,
    describe,
    initialize_missing_leaves,
    name_leaves,
    orbax_target,
    restored_leaf,
    to_stored,
)
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import FileLock, write_file

_ARRAYS = "arrays"
_Fields = Mapping[str, Callable[[], Any]]
_open_managers: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class SaveRecord:
    """Cost of a finished save: bytes of arrays on all processes, and seconds that `save` blocked its caller."""

    step: int
    num_bytes: int
    blocking_seconds: float
    total_seconds: float


@atexit.register
def _warn_of_lost_saves() -> None:
    # An interpreter that shuts down starts no threads, which Orbax needs: the save cannot be finished here.
    for manager in list(_open_managers):
        if manager._thread is not None and manager._thread.is_alive():
            manager._report("the last save is lost: the process ended without CheckpointManager.close()")


class CheckpointManager:
    """Saves and restores the checkpoints of a run, in one directory on a file system that the run's processes share.

    Every process creates it and calls it in the same way. Reading takes no lock and changes nothing on disk, so that
    a run can be read while it trains.

    Args:
      directory: the directory of checkpoints, made when it is needed.
      config: intervals and limits.
      report: called with one-line warnings (damage, foreign entries, failed saves); default: a logger's `warning`.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig | None = None,
        *,
        report: Callable[[str], None] | None = None,
    ):
        self.directory = Path(directory).absolute()
        self.config = config or CheckpointConfig()
        self.last_save: SaveRecord | None = None
        self._write_line = report or logging.getLogger("jaxstack.checkpoint").warning
        self._reported: set[str] = set()
        self._damage_finder = DamageFinder()
        self._deletion_check = DeletionCheck(self._report)
        self._thread: threading.Thread | None = None
        self._error: JaxstackError | None = None
        self._lock: FileLock | None = None
        self._attempts = 0
        self._timeout_seconds = 60 * self.config.timeout_minutes
        _open_managers.add(self)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        # This process is failing: waiting for an agreement with the others could block forever.
        self._finish_thread()
        self._release()

    def claim(self) -> None:
        """Lock the checkpoint directory, so that no other run saves here from now on.

        Raises:
          JaxstackError: another run saves here, or the directory cannot be written.
        """
        failure: JaxstackError | None = None
        if coordination.is_first():
            try:
                self._take_lock()
            except OSError as error:
                failure = cannot_write(error.filename or self.directory, error)
            except JaxstackError as error:
                failure = error
        if not coordination.all_true(failure is None):
            wrong = not coordination.all_true(not isinstance(failure, ConfigError))
            kind = ConfigError if wrong else JaxstackError
            raise failure or kind(f"the first process cannot save in {self.directory}; it says why")

    def should_save(self, step: int, last_step: int | None = None) -> bool:
        """Return True if the configured interval makes a checkpoint due after `step` steps."""
        return should_save(step, self.config.every_steps, last_step)

    def save(
        self,
        step: int,
        state: PyTree,
        extra: object = None,
        wait: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Save a pytree and `extra` as the checkpoint of `step`, replacing an earlier one of this step.

        Returns once the state is in host memory, so that its buffers may be donated. Host memory has at most one copy:
        a save that is still being written is waited for first. A save that fails is reported, in the background too,
        and leaves nothing behind; the next one starts from scratch.

        Args:
          step: number of steps done, 0 or more.
          state: arrays, random keys and plain Python values.
          extra: plain JSON.
          wait: return when the save is committed, and raise if it fails; as with `async: false`.
          files: further files of the checkpoint, name -> content, which the first process writes.

        Raises:
          JaxstackError: a leaf or `extra` cannot be stored, another process saves here, or the save failed.
        """
        started = time.monotonic()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise JaxstackError(f"the step of a checkpoint is a number from 0 on, not {step!r}")
        leaves, _ = name_leaves(state)
        specs = {name: describe(name, leaf) for name, leaf in leaves.items()}
        index = make_index(step, specs, extra)
        self._join()
        wait = wait or not self.config.asynchronous
        self._attempts += 1
        staging = self.directory / f".saving-{step}-{self._attempts}"
        job = SaveJob(step, staging, index, started, announced=not wait, files=files or {})
        if self._prepare(job):
            kept = {name: spec for name, spec in specs.items() if spec.has_array}
            stored = {name: to_stored(leaves[name], spec) for name, spec in kept.items()}
            job.num_bytes = sum(array.nbytes for array in stored.values())
            self._start(job, stored)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress, if any, is on disk.

        Raises:
          JaxstackError: the last save was not committed.
        """
        self._join()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in progress, and release the lock of the checkpoint directory.

        Raises:
          JaxstackError: the last save was not committed.
        """
        try:
            self.wait()
        finally:
            self._release()

    def latest_step(self) -> int | None:
        """Return the step of the newest undamaged checkpoint; None if there is no checkpoint.

        Damaged checkpoints are reported with the file's name and skipped.

        Raises:
          JaxstackError: there are checkpoints, and all of them are damaged.
        """
        self._join()
        newest_damage = None
        for step in self._agreed_steps():
            damage = self._damage_finder.find(self._path(step), step)
            if damage is None:
                return step
            newest_damage = newest_damage or f"{self._path(step)}/{damage}"
            self._report(f"checkpoint {self._path(step)} is damaged and passed over: {damage}")
        if newest_damage is not None:
            raise JaxstackError(
                f"every checkpoint in {self.directory} is damaged (the newest: {newest_damage}): "
                "restore one from a copy, or move the directory away to start anew"
            )
        return None

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints in ascending order, without checking their content."""
        return sorted(e.step for e in directory.scan(self.directory) if e.kind == "committed")

    def extra(self, step: int) -> Any:
        """Return the extra data that was saved with the checkpoint of `step`, without loading arrays.

        Raises:
          JaxstackError: the checkpoint is damaged.
        """
        return self._checked_index(step).get("extra")

    def read_file(self, step: int, name: str) -> bytes | None:
        """Return the content of a file that was given to `save` as one of `files`; None if there is none.

        Raises:
          JaxstackError: the checkpoint is damaged.
        """
        return (self._path(step) / name).read_bytes() if name in self._checked_index(step)["files"] else None

    def restore(
        self, step: int, abstract_tree: PyTree, *, subset: bool = False, later: _Fields | None = None
    ) -> tuple[PyTree, Any]:
        """Load pytree and extra data of the checkpoint of `step`, after verifying its files if they were not yet.

        Args:
          step: a committed step.
          abstract_tree: the wanted tree. jax.ShapeDtypeStruct (with a sharding, on any mesh) and arrays are loaded as
            jax.Array, numpy arrays as numpy, Python values as Python values.
          subset: leave leaves of the checkpoint that are not wanted unread, instead of raising.
          later: top-level fields that older checkpoints lack, each with a function of its initial value. A field
            without any leaf in the checkpoint gets its initial value, and that is reported.

        Returns:
          (tree in the structure of `abstract_tree`, extra).

        Raises:
          JaxstackError: the trees differ, or the checkpoint is damaged; the message names the leaves or the file.
        """
        self._join()
        index = self._checked_index(step)
        source = str(self._path(step))
        stored = {name: LeafSpec.from_json(fields) for name, fields in index["leaves"].items()}
        wanted, structure = name_leaves(abstract_tree)
        fresh = initialize_missing_leaves(wanted, stored, later or {})
        for field in dict.fromkeys(name.partition("/")[0] for name in fresh):
            self._report(f"the checkpoint {source} is older than {field!r}, which begins anew")
        stored |= {name: describe(name, leaf) for name, leaf in fresh.items()}
        check_layout(source, {name: describe(name, leaf) for name, leaf in wanted.items()}, stored, subset)
        to_read = [name for name in wanted if stored[name].has_array and name not in fresh]
        targets = {name: orbax_target(wanted[name], stored[name]) for name in to_read}
        try:
            loaded = arrays.read(self._path(step) / _ARRAYS, targets, self._timeout_seconds)
        except Exception as error:
            reason = explain(error, source)
            raise JaxstackError(f"the checkpoint {source} could not be read: {reason}") from error
        loaded |= fresh
        leaves = [restored_leaf(name, loaded.get(name), leaf, stored[name]) for name, leaf in wanted.items()]
        return structure.unflatten(leaves), index.get("extra")

    def discard_newer(self, step: int) -> None:
        """Delete all checkpoints after `step`, when the run goes back to that step."""
        self._join()
        if not coordination.is_first():
            return
        self._take_lock()
        for later in self.all_steps():
            if later > step:
                directory.delete(self._path(later))

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_lock(self) -> None:
        if self._lock is not None and not self._lock.is_in_place():
            self._report(f"{self.directory} was removed or renamed while the run saves there; it is made anew, empty")
            self._release()
        if self._lock is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = directory.lock_directory(self.directory)

    def _prepare(self, job: SaveJob) -> bool:
        """Create the folder of a new save, on the first process; return False and note the error if that fails."""
        failure: Exception | None = None
        if coordination.is_first():
            try:
                self._take_lock()
                directory.clear_unfinished(self.directory)
                job.staging.mkdir()
                for name, content in job.files.items():
                    write_file(job.staging / name, content, durable=False)  # flushed when it is hashed
            except (OSError, JaxstackError) as error:
                failure = error
        if coordination.all_true(failure is None):
            return True
        if isinstance(failure, JaxstackError):
            raise failure
        self._fail(job, failure or OSError("the first process could not make its folder"))
        return False

    def _start(self, job: SaveJob, stored: dict[str, Any]) -> None:
        try:
            finish_write = arrays.start_write(job.staging / _ARRAYS, stored, self._timeout_seconds)
        except OSError as error:
            finish_write = functools.partial(_raise, error)  # in the background, as the others wait for this process
        except BaseException:
            directory.remove_tree(job.staging)
            raise
        job.blocking_seconds = time.monotonic() - job.started
        self._thread = threading.Thread(target=self._finish, args=(job, finish_write), daemon=True)
        self._thread.start()

    def _finish(self, job: SaveJob, finish_write: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            finish_together(job.staging, finish_write)
        except Exception as error:
            failure = error
        final = self.directory / str(job.step)
        try:
            moved = commit(job.staging, final, job.index, self._timeout_seconds, failure)
            if coordination.is_first():
                manifest.check(final, job.step, hashes=False)
        except Exception as error:
            self._fail(job, error)
            return
        if moved is not None:
            self._report(f"{final} was not a checkpoint and was moved to {moved}")
        self._error = None
        total_seconds = time.monotonic() - job.started
        self.last_save = SaveRecord(job.step, job.num_bytes, job.blocking_seconds, total_seconds)
        if coordination.is_first():
            self._delete_old(job.step)

    def _delete_old(self, committed: int) -> None:
        try:
            check = self._deletion_check
            good = [step for step in self.all_steps() if check.has_right_sizes(self._path(step), step)]
            doomed: tuple[int, ...] = ()

            def verified(step):
                return check.is_intact(self._path(step), step, trusted=step == committed)

            while doomed := steps_to_delete(good, self.config.keep, self.config.keep_every_steps, {committed}):
                damaged = [step for step in good if step not in doomed and not verified(step)]
                if not damaged:
                    break
                good = [step for step in good if step not in damaged]
            for step in doomed:
                directory.delete(self._path(step))
        except OSError as error:
            self._report(f"an old checkpoint in {self.directory} could not be deleted: {error}")

    def _fail(self, job: SaveJob, error: Exception) -> None:
        if coordination.is_first():
            directory.remove_tree(job.staging)
        self._error = JaxstackError(
            f"the checkpoint of step {job.step} was not saved: {explain(error, str(self.directory))}; "
            "nothing of it is left on disk, and older checkpoints are untouched"
        )
        self._error.__cause__ = error
        if job.announced:
            self._report(str(self._error))

    def _finish_thread(self) -> bool:
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.join()
        return thread is not None

    def _join(self) -> None:
        if not self._finish_thread():
            return
        if not coordination.all_true(self._error is None) and self._error is None:
            self._error = JaxstackError("the last checkpoint was not saved: another process failed at it")

    def _report(self, line: str) -> None:
        if coordination.is_first() and line not in self._reported:
            self._reported.add(line)
            self._write_line(line.encode("utf-8", "backslashreplace").decode())  # file names may be any bytes

    def _agreed_steps(self) -> Iterator[int]:
        """Yield the steps of committed checkpoints, newest first, as process 0 sees them on disk."""
        steps = []
        if coordination.is_first():
            for entry in directory.scan(self.directory):
                if entry.kind == "committed":
                    steps.append(entry.step)
                elif entry.kind == "foreign":
                    self._report(f"{entry.path} is not a checkpoint and is ignored: {entry.reason}")
                elif entry.kind == "half-written":
                    self._report_unfinished(entry.path)
        yield from coordination.broadcast_from_first(steps)

    def _report_unfinished(self, path: Path) -> None:
        ours = any(m._lock is not None and m.directory == self.directory for m in _open_managers)
        if not ours and (holder := directory.saving_process(self.directory)) is not None:
            self._report(f"{path} is being written by {holder}; the newest finished checkpoint is taken")
        elif not ours:
            self._report(f"{path} is a save that was cut off; the next save removes it")

    def _path(self, step: int) -> Path:
        final = self.directory / str(step)
        return final if final.exists() else final.with_name(f".replaced-{step}")

    def _checked_index(self, step: int) -> dict[str, Any]:
        if not coordination.broadcast_from_first(step in self.all_steps()):
            known = ", ".join(map(str, self.all_steps())) or "none"
            raise JaxstackError(f"no checkpoint of step {step} in {self.directory}: there are {known}")
        damage = self._damage_finder.find(self._path(step), step)
        if damage is not None:
            raise JaxstackError(f"the checkpoint {self._path(step)} is damaged: {damage}")
        return manifest.read_index(self._path(step))


def _raise(error: Exception) -> None:
    raise error
