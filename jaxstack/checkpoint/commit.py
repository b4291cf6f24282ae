"""Commits a save, and finds damaged checkpoints: work on files that the processes of a run divide.

A save ends in a background thread: the processes hash the files that they wrote, and the first one writes the manifest
and renames the folder. Later they divide the reading of a checkpoint, and agree on whether it is damaged.
"""

import dataclasses
import datetime
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxstack.checkpoint import directory, manifest
from jaxstack.checkpoint.leaves import LeafSpec
from jaxstack.distributed import coordination
from jaxstack.errors import JaxstackError
from jaxstack.files import write_file

_PART = ".hashes-"
_LOOK_SECONDS = 0.2


@dataclasses.dataclass
class SaveJob:
    """A checkpoint being written in the background: step, temporary folder, content of its files, and timings."""

    step: int
    staging: Path
    index: dict[str, Any]
    started: float
    announced: bool
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    blocking_seconds: float = 0.0


class OtherProcessFailed(JaxstackError):
    """Raised where this process could write its part of a checkpoint, but another process could not."""


def finish_together(staging: Path, finish_write: Callable[[], None]) -> None:
    """Wait until all processes have written their parts of a checkpoint; every process calls it.

    Orbax waits for the part of a process that failed until its time limit. This function does not: a process that fails
    tells the others. They leave the thread that waits behind.

    Args:
      staging: folder of the save.
      finish_write: waits until this process's part is written, and raises if that failed.

    Raises:
      OtherProcessFailed: another process failed; the message has its reason.
      Exception: this process failed.
    """
    index, count = coordination.process_position()
    if count == 1:
        finish_write()
        return
    failure: list[Exception] = []
    key = f"{staging.name}-failed"

    def finish() -> None:
        try:
            finish_write()
        except Exception as error:
            failure.append(error)
            coordination.publish(key, f"process {index} on {socket.gethostname()}: {explain(error, str(staging))}")

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        told = coordination.try_read(key) if thread.is_alive() else None
        if told is not None:
            coordination.abandon_thread()
            raise OtherProcessFailed(told)
    if failure:
        raise failure[0]


def commit(
    staging: Path, final: Path, index: dict[str, Any], timeout_seconds: int, failure: Exception | None = None
) -> Path | None:
    """Commit a checkpoint: hash the files written to `staging`, write the manifest, and rename the folder to `final`.

    Every process calls it, even if its write failed.

    The processes divide the hashing and write their hashes to files in `staging`; if one of these is missing, the save
    fails on all processes.

    Args:
      staging: folder with the written arrays.
      final: folder of the checkpoint.
      index: content of checkpoint.json, from `make_index`.
      timeout_seconds: limit on waiting for the other processes.
      failure: the exception of this process's write, if it failed.

    Returns:
      The new place of something at `final` that was not a checkpoint and was moved aside; None if there was nothing.

    Raises:
      Exception: `failure`, or the OSError that prevented the commit.
    """
    position, count = coordination.process_position()
    moved = None
    try:
        if failure is not None:
            raise failure
        digests = manifest.hash_files(staging, manifest.list_files(staging)[position::count], sync=True)
        if count > 1:
            write_file(staging / f"{_PART}{position}", json.dumps(digests).encode())
    except Exception as error:
        failure = error
        digests = {}
    coordination.barrier(f"{staging.name}-hashed", timeout_seconds)
    if coordination.is_first() and failure is None:
        try:
            if count > 1:
                digests = _merge_parts(staging, count)
            manifest.write_manifest(staging, digests, index)
            moved = directory.put_in_place(staging, final)
        except Exception as error:
            failure = error
    coordination.barrier(f"{staging.name}-committed", timeout_seconds)
    if failure is not None:
        raise failure
    return moved


def _merge_parts(staging: Path, count: int) -> dict[str, str]:
    digests: dict[str, str] = {}
    for position in range(count):
        part = staging / f"{_PART}{position}"
        try:
            digests |= json.loads(part.read_text("utf-8"))
        except FileNotFoundError as error:
            raise OSError(f"process {position} could not write its part") from error
        part.unlink()
    return digests


def make_index(step: int, specs: dict[str, LeafSpec], extra: object) -> dict[str, Any]:
    """Return the content of checkpoint.json: step, jax and orbax versions, extra data, each leaf's shape and dtype.

    Raises:
      JaxstackError: `extra` is not plain JSON.
    """
    try:
        extra = json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise JaxstackError(f"the extra data of a checkpoint is plain JSON: {error}") from error
    return {
        "format": manifest.FORMAT,
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("jax", "orbax-checkpoint")},
        "extra": extra,
        "leaves": {name: spec.to_json() for name, spec in specs.items()},
    }


_DISK_ERRORS = (
    (("no space left", "enospc"), "no space left on the disk of {}: free some, or lower checkpoint.keep"),
    (("quota exceeded", "edquot"), "the disk quota of {} is used up: free some, or lower checkpoint.keep"),
    (("file too large", "efbig"), "a file in {} would exceed the limit on file sizes: raise it (ulimit -f)"),
    (("read-only file system", "erofs"), "the file system of {} is mounted read-only: mount it for writing"),
    (("too many open files", "emfile"), "too many files are open for {}: raise the limit (ulimit -n)"),
    (("permission denied", "eacces"), "no permission for {}: check its owner and mode"),
)
"""(Words in an error of the operating system, in lower case, as Orbax and TensorStore pass it on; message)."""


def explain(error: BaseException, folder: str) -> str:
    """Return in one line why a save to `folder` failed, e.g. that the disk is full or that it timed out."""
    if isinstance(error, OtherProcessFailed):
        return str(error)
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    text = " ".join(chain)
    for words, reason in _DISK_ERRORS:
        if any(word in text.lower() for word in words):
            return reason.format(folder)
    if not os.path.isdir(folder):
        return f"{folder} was removed while it was written"
    if "interpreter shutdown" in text or "after shutdown" in text:
        return "the process ended without CheckpointManager.close()"
    if isinstance(error, TimeoutError):
        return "it took longer than checkpoint.timeout_minutes"
    return chain[0].splitlines()[0]


class DamageFinder:
    """Compares checkpoints with their manifests of file hashes, and remembers intact ones until they are written to."""

    def __init__(self) -> None:
        self._intact: dict[int, Any] = {}

    def find(self, path: Path, step: int) -> str | None:
        """Return what is damaged in a checkpoint, beginning with the file's name; None if it is intact.

        Every process must call it.

        Args:
          path: the checkpoint.
          step: its step.
        """
        damage = None
        seen = manifest.signature(path)
        if coordination.all_true(seen is not None and self._intact.get(step) == seen):
            return None
        try:
            manifest.check(path, step, coordination.process_position())
        except manifest.Damaged as error:
            damage = str(error)
        if not coordination.all_true(damage is None):
            return damage or _name_damage(path, step)
        self._intact[step] = seen
        return None


def _name_damage(path: Path, step: int) -> str:
    """Return a message about damage that another process found; only on process 0 does it name the file."""
    try:
        if coordination.is_first():
            manifest.check(path, step)
    except manifest.Damaged as error:
        return str(error)
    return "another process found a damaged file"


class DeletionCheck:
    """Checks that a newer checkpoint is intact before older ones are deleted. Used only on the first process.

    Args:
      report: called with a line about each damaged checkpoint.
    """

    def __init__(self, report: Callable[[str], None]):
        self._report = report
        self._verified: dict[int, Any] = {}

    def is_intact(self, path: Path, step: int, trusted: bool) -> bool:
        """Return True if a checkpoint's files match their hashes, so that older checkpoints may be deleted.

        Each checkpoint of an earlier start is read once.

        Args:
          path: the checkpoint.
          step: its step.
          trusted: this process has just written it, so that it need not be read.
        """
        seen = manifest.signature(path)
        known = trusted or (seen is not None and self._verified.get(step) == seen)
        if not known and not self._passes(path, step, hashes=True):
            return False
        self._verified[step] = seen
        return True

    def has_right_sizes(self, path: Path, step: int) -> bool:
        """Return True if a checkpoint's files have the sizes recorded in it; their contents are not read."""
        return self._passes(path, step, hashes=False)

    def _passes(self, path: Path, step: int, *, hashes: bool) -> bool:
        """Return True if a checkpoint passes the check of its sizes, or of its hashes too; report what is damaged."""
        try:
            manifest.check(path, step, hashes=hashes)
        except manifest.Damaged as damage:
            self._report(f"checkpoint {path} is damaged and does not count towards checkpoint.keep: {damage}")
            return False
        return True
