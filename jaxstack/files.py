"""Atomic and durable writing of files, and locks between processes."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxstack.errors import ConfigError, JaxstackError, cannot_write

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the files that a clone without Git LFS has in place of large ones."""


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, which atomically replaces the file `path` when the block ends.

    Readers see the old content or the new one, never a part. If the block raises, `path` is unchanged.

    Args:
      path: the file to write.
      durable: flush the file and the rename to the disk, so that both survive a power cut.

    Yields:
      The temporary file, open for writing bytes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
            error.filename = str(path)
        raise
    if durable:
        sync_directory(path.parent)


def write_file(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file atomically: readers find either all of the new content or the old file; see `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(content)


def write_json(path: Path, value: object) -> None:
    """Write `value` atomically to an indented JSON file; see `replacing`."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def sync_directory(folder: Path) -> None:
    """Flush the entries of one folder to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Create `folder`, and turn an OSError inside the `with` block (such as a full disk) into a JaxstackError.

    Raises:
      JaxstackError: the folder or a file in it could not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        reason = f"{e.strerror or e}" + (f" ({e.filename})" if e.filename else "")
        if e.errno == errno.EFBIG:
            reason += ", the limit on file sizes (ulimit -f)"
        raise JaxstackError(f"cannot write to {folder}: {reason}; start again to go on from here") from None


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """Create a directory completely or not at all: the `with` block fills a temporary one, which is renamed at its end.

    The temporary directory is created first, so that a location without write permission fails before the work; it is
    removed if the block raises. What a process that was killed has left in it is removed by the next one, so that a
    command that is started again, as by the launcher, finds room and no half directory.

    Args:
      folder: the directory to create; must not exist, or be empty. Missing parents are created.

    Yields:
      The temporary directory, empty: `.NAME.tmp/NAME` next to `folder`.

    Raises:
      ConfigError: it exists, or cannot be written to.
      JaxstackError: the disk is full, or another process is writing to it.
    """
    check_new(folder)
    hidden = folder.with_name(f".{folder.name}.tmp")
    staging = hidden / folder.name
    try:
        hidden.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        with exclusive(hidden / ".lock"):
            try:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
                yield staging
                os.rename(staging, folder)
                sync_directory(folder.parent)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and error.filename2 is not None:
            raise _exists(folder) from None
        if str(error.filename).startswith(str(hidden)):
            raise cannot_write(folder, error) from None
        raise
    except JaxstackError as error:  # name the directory that was asked for
        text = str(error).replace(str(staging), str(folder)).replace(str(hidden), str(folder))
        raise type(error)(text) from None


def check_new(folder: Path) -> None:
    """Check that `new_directory` can create a directory: nothing is there, or an empty directory.

    Raises:
      ConfigError: it exists.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())):
        raise _exists(folder)


def _exists(folder: Path) -> ConfigError:
    return ConfigError(f"{folder} exists already; give another directory, or remove it.")


class LockHeld(Exception):
    """Raised if another process holds a lock. The message names that process if it is known: `process 17 on host a`."""


class FileLock:
    """An advisory lock on a file, which records the process that holds it and is freed when that process ends.

    Args:
      path: the lock file, created if missing; a symbolic link there is refused.
      per_process: False: the lock belongs to this object, so that threads of one process exclude each other too
        (`flock`). True: it belongs to the process, which can take it several times (POSIX record locks).
    """

    def __init__(self, path: Path, *, per_process: bool = False):
        self._path = path
        self._lock = fcntl.lockf if per_process else fcntl.flock
        # O_NOFOLLOW: writing the holder's name would otherwise write into the target of a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o644), "r+", encoding="utf-8", errors="replace")

    def acquire(self, *, wait: bool = False) -> None:
        """Take the lock; if another process holds it, wait or raise LockHeld.

        Args:
          wait: wait for another process to free it, instead of raising.

        Raises:
          LockHeld: another process has it, and `wait` is False.
          OSError: the file system has no locks.
        """
        try:
            self._lock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError) as error:
            self._file.seek(0)
            raise LockHeld(self._file.read().strip()) from error
        with contextlib.suppress(OSError):  # on a full disk: the lock is valid without the name of its holder
            os.ftruncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def is_in_place(self) -> bool:
        """Return True if the lock file at `path` has not been removed or replaced since it was locked."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
            mine = os.fstat(self._file.fileno())
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Free the lock and close the file."""
        self._file.close()


def lock_holder(path: Path) -> str | None:
    """Return text that names the process holding the POSIX lock on a file; None if the file is unlocked or unreadable.

    A process that holds a record lock on the file itself must not ask: closing the file would free its lock.
    """
    layout = "hhqqi"  # struct flock: type, whence, start, length, pid
    try:
        with open(path, "rb") as file:
            asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            known = file.read(200).decode(errors="replace").strip()
    except (OSError, struct.error):
        return None
    return None if kind == fcntl.F_UNLCK else known or f"process {pid}"


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Context manager that holds the lock file `path`, so that only one process at a time runs the block.

    Args:
      path: the lock file; its folder is created if missing.
      on_wait: called once if another process holds the lock, before waiting for it. None: raise instead of waiting.

    Raises:
      JaxstackError: another process holds the lock, and `on_wait` is None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        try:
            lock.acquire()
        except LockHeld as error:
            if on_wait is None:
                raise JaxstackError(
                    f"another process is writing to {path.parent} ({error}): wait until it is done"
                ) from None
            on_wait()
            lock.acquire(wait=True)
        yield
    finally:
        lock.release()
