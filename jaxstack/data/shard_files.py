"""Reads byte ranges of token shard files: local files, and remote ones in object stores with local copies."""

import functools
import hashlib
import os
import queue
import re
import threading
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import tensorstore

from jaxstack.errors import JaxstackError
from jaxstack.files import write_file

SCHEMES = ("file", "memory", "gs", "s3", "http", "https")
RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
"""Retries of a request that failed, about 24 seconds in all."""
_WAYS_OUT = {
    "gs": "the bucket's name, the network, and the credentials (gcloud auth application-default login, or a key file "
    "in GOOGLE_APPLICATION_CREDENTIALS)",
    "s3": "the bucket's name, the network, and the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "~/.aws); another service than Amazon's needs AWS_ENDPOINT_URL",
    "http": "the address and the network",
    "https": "the address and the network",
}
"""Scheme -> what to check if its objects cannot be read."""


class RangesIgnored(JaxstackError):
    """Raised when the server ignores HTTP range requests and sends whole objects only."""


def is_object_url(path: str) -> bool:
    """Return True if `path` is a URL that TensorStore reads."""
    return path.partition("://")[0] in SCHEMES and "://" in path


class ObjectStore:
    """Read-only access to the objects below a URL. Picklable and thread-safe; no request is made before a read.

    Args:
      url: `gs://bucket/folder`, `s3://bucket/folder`, `https://host/folder`, `file:///folder`, or `memory://folder`.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/") + "/"

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content of an object, or its bytes from `start` to `stop` (exclusive).

        Raises:
          RangesIgnored: the server sends whole objects only.
          JaxstackError: there is no such object, it is too short, or it cannot be reached; the message has the way out.
        """
        try:
            store = _open(self.url)
            result = store.read(name, byte_range=slice(start, stop)).result()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise self._failure(name, str(error)) from None
        if result.state != "value":
            raise JaxstackError(f"{self.url}{name} does not exist: check the URL, or prepare and copy the data again")
        return result.value

    def exists(self, name: str) -> bool:
        """Return True if the object exists. Reads the whole object, so use it for small ones.

        Raises:
          JaxstackError: the store cannot be reached.
        """
        try:
            return _open(self.url).read(name).result().state == "value"
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise self._failure(name, str(error)) from None

    def _failure(self, name: str, reason: str) -> JaxstackError:
        reason = re.sub(r"\s*\[[a-z_]+=.*\]", "", reason).strip()
        if "was ignored by server" in reason:
            return RangesIgnored(
                f"the server of {self.url}{name} sends whole files only, no parts of them: set data.shard_cache to a "
                "local directory, into which whole shards are copied"
            )
        if "OUT_OF_RANGE" in reason or "Unexpected Content-Range" in reason:
            return JaxstackError(f"{self.url}{name} is shorter than its index says: copy the data again ({reason})")
        way_out = _WAYS_OUT.get(self.url.partition("://")[0], "the path and its permissions")
        return JaxstackError(f"cannot read {self.url}{name}: {reason}; check {way_out}")


@functools.lru_cache(maxsize=64)
def _open(url: str) -> tensorstore.KvStore:
    spec: str | dict[str, Any] = url
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if url.startswith("s3://") and endpoint:
        bucket, _, path = url.removeprefix("s3://").partition("/")
        spec = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint.rstrip("/")}
    return tensorstore.KvStore.open(spec, context=_context()).result()


@functools.cache
def _context() -> tensorstore.Context:
    return tensorstore.Context({f"{store}_request_retries": RETRIES for store in ("http", "gcs", "s3")})


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
