"""Writes files atomically and durably, and locks directories between processes."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxstack.errors import JaxstackError


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes beside `path`, flushes to the disk, renames into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_file` of `value` as readable JSON."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Makes `folder`, and turns what the disk refuses (full, read-only, not permitted) into one message."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        reason = f"{e.strerror or e}" + (f" ({e.filename})" if e.filename else "")
        raise JaxstackError(f"cannot write to {folder}: {reason}; start again to go on from here") from None


def sync_directory(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock file `path`.

    Args:
      waiting: called once where another process holds it; then waits for it. None: raises instead.

    Raises:
      JaxstackError: another process holds it, and `waiting` is None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise JaxstackError(f"another process is writing to {path.parent}: wait until it is done") from None
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
