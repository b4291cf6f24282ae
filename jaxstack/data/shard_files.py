"""Reads byte ranges of token shard files: local files, and remote ones with local copies."""

import hashlib
import os
import queue
import threading
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from jaxstack.data.object_store import ObjectStore, RangesIgnored
from jaxstack.errors import JaxstackError
from jaxstack.files import write_file

MOST_OPEN_FILES = 128


class ShardFiles(Protocol):
    """Interface for reading byte ranges of shard files by name; picklable, and safe to use from several threads."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return `length` bytes of the file `name` from `offset` on.

        Raises:
          JaxstackError: the file is missing, unreachable or too short; the message names it.
        """
        ...

    def close(self) -> None:
        """Close all open files; a later read opens them again."""
        ...


class LocalFiles:
    """Shard files of a local directory; the most recently used ones stay open.

    Reads with pread instead of a memory map: a file that is cut off while in use then gives an error, not SIGBUS. The
    overhead of TensorStore's `file` driver for each read is large compared with a row of a few KB.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFiles, (self.folder,)

    def read(self, name: str, offset: int, length: int) -> bytes:
        handle = self._handle(name)
        try:
            data = os.pread(handle, length, offset)
        finally:
            os.close(handle)
        if len(data) != length:
            raise JaxstackError(f"token shard {self.folder / name} became shorter while it was in use")
        return data

    def _handle(self, name: str) -> int:
        """Return a file descriptor of a shard for the caller alone, so that no other thread closes it during a read."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return os.dup(self._open[name])
        path = self.folder / name
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))  # may stall, so without the lock
        except OSError as e:
            raise JaxstackError(f"token shard {path} cannot be read: {e.strerror}") from None
        with self._lock:
            if name not in self._open:
                while len(self._open) >= MOST_OPEN_FILES:
                    os.close(self._open.popitem(last=False)[1])
                self._open[name] = os.dup(handle)
        return handle

    def close(self) -> None:
        with self._lock:
            _close_all(self._open)


def _close_all(files: OrderedDict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])


class RemoteFiles:
    """Shard files of an object store, with copies in a local directory.

    Without a directory every read is a request for just these bytes. With one, the shards that are read are copied into
    it by a thread, which checks their SHA-256; later reads use the copy. A read does not wait for a copy, unless the
    server cannot send parts of a file.

    Args:
      store: where the shards are.
      hashes: name -> SHA-256 of each shard.
      cache: directory of the copies, which other processes may share; None: no copies.
    """

    def __init__(self, store: ObjectStore, hashes: dict[str, str], cache: Path | None):
        self._store = store
        self._hashes = hashes
        self._cache = cache
        self._copies = LocalFiles(cache) if cache is not None else None
        self._copied: set[str] = set()
        self._wanted: set[str] = set()
        self._failed = False
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._store, self._hashes, self._cache)

    def read(self, name: str, offset: int, length: int) -> bytes:
        if self._copies is not None and name in self._copied:
            return self._copies.read(name, offset, length)
        self._request_copy(name)
        try:
            return self._store.read(name, offset, offset + length)
        except RangesIgnored:
            if self._copies is None:
                raise
            self._copy(name)
            return self._copies.read(name, offset, length)

    def _request_copy(self, name: str) -> None:
        """Ask the background thread to copy a shard to the local directory, once for each shard."""
        if self._cache is None or self._failed:
            return
        with self._lock:
            if name in self._wanted:
                return
            self._wanted.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy_all, name="shard-copies", daemon=True)
                self._thread.start()
        self._queue.put(name)

    def _copy_all(self) -> None:
        while (name := self._queue.get()) is not None and not self._failed:
            try:
                self._copy(name)
            except (JaxstackError, OSError) as error:  # reads go on over the network, and report what is wrong there
                self._failed = True
                warnings.warn(f"no more shards are copied to {self._cache}: {error}", stacklevel=2)

    def _copy(self, name: str) -> None:
        """Copy a shard to the local directory, unless a verified copy is there.

        Raises:
          JaxstackError: its content is not what the index says.
        """
        assert self._cache is not None
        path = self._cache / name
        with self._copying:
            if not path.is_file():
                content = self._store.read(name)
                if hashlib.sha256(content).hexdigest() != self._hashes[name]:
                    raise JaxstackError(f"token shard {self._store.url}{name} is corrupt: copy it to the store again")
                write_file(path, content)
            self._copied.add(name)

    def close(self) -> None:
        self._queue.put(None)
        if self._copies is not None:
            self._copies.close()
