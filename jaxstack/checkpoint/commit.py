"""Last part of a save, in a background thread: hash the written files, write the manifest, rename the folder."""

import dataclasses
import datetime
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxstack.checkpoint import directory, manifest
from jaxstack.checkpoint.leaves import LeafSpec
from jaxstack.distributed import coordination
from jaxstack.errors import JaxstackError
from jaxstack.files import write_file

_PART = ".hashes-"


@dataclasses.dataclass
class SaveJob:
    """A checkpoint being written in the background: step, temporary folder, content of checkpoint.json, and timings."""

    step: int
    staging: Path
    index: dict[str, Any]
    started: float
    announced: bool
    num_bytes: int = 0
    blocking_seconds: float = 0.0


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
