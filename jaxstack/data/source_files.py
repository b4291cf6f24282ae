"""Finds and opens the files of a data source: local paths, globs and URLs, plain or compressed."""

import difflib
import glob as globbing
import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import LFS_POINTER

EXTRA = "pip install 'jaxstack[data]'"
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """A file of a data source, with its size and version (such as modification time) to detect changed content."""

    path: str
    """An absolute local path, or a URL."""
    name: str
    """The path relative to the source, which orders the documents."""
    size: int
    version: str
    """Modification time, or the object store's tag."""
    explicit: bool = False
    """True if the user named this file; False if it was found in a directory or by a glob."""

    @property
    def suffix(self) -> str:
        """File name extension without a compression suffix: `.jsonl` for `a.jsonl.gz`."""
        base = self.name.lower()
        for c in COMPRESSED:
            base = base.removesuffix(c)
        return os.path.splitext(base)[1]

    @property
    def compressed(self) -> bool:
        return self.name.lower().endswith(COMPRESSED)

    def identity(self) -> list:
        return [self.path, self.name, self.size, self.version]


def find_files(path: str) -> list[SourceFile]:
    """Find the files that `path` names: a file, all files in a directory, or a glob; a local path or a URL.

    Returns:
      The files, sorted by relative path.
    Raises:
      ConfigError: nothing matches; the message names the nearest existing path.
    """
    if "://" in path:
        return _find_remote(path)
    expanded = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(expanded):
        return [_local(expanded, os.path.basename(expanded), explicit=True)]
    if os.path.isdir(expanded):
        found = [_local(p, os.path.relpath(p, expanded)) for p in walk(expanded)]
        return _not_empty(found, path, f"the directory {expanded} holds no files")
    if os.path.lexists(expanded):
        _check_link(expanded)
        raise ConfigError(f"the data source {path!r} is a pipe or a device, which cannot be read twice: give a file")
    if globbing.has_magic(expanded):
        found = [_local(p, os.path.relpath(p, os.path.sep)) for p in _matches(_escape_existing(expanded))]
        return _not_empty(found, path, _nearest_path(expanded))
    return _not_empty([], path, _nearest_path(expanded))


def walk(root: str, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield all files below `root`, except hidden ones and those in `__pycache__` or directories named in `skipped`.

    Links to directories outside of `root` are followed, and each directory is read once, so that links cannot go round
    in circles. Pipes, sockets and devices are left out, whose reading may never end.
    """
    for folder, names in _folders(root, skipped):
        for path in (os.path.join(folder, n) for n in names if not n.startswith(".")):
            if os.path.isfile(path) or not os.path.exists(path):  # a broken link is reported later
                yield path


def _matches(pattern: str) -> list[str]:
    """Return the files that a glob matches, those of each directory once, also if links lead to it on several paths."""
    found = sorted(filter(os.path.isfile, _expand(pattern)), key=lambda p: (p.count(os.path.sep), p), reverse=True)
    return list({(os.path.realpath(os.path.dirname(p)), os.path.basename(p)): p for p in found}.values())


def _escape_existing(pattern: str) -> str:
    """Escape the directories of a glob that exist as they are written, such as `data[1]` in `data[1]/*.txt`."""
    path = Path(pattern)
    there = next(above for above in path.parents if above.exists())
    return os.path.join(globbing.escape(str(there)), path.relative_to(there))


def _expand(pattern: str) -> Iterator[str]:
    """Yield what a glob matches; unlike `glob.glob`, `**` does not follow links in circles."""
    before, deep, after = (pattern + "/*" if pattern.endswith("/**") else pattern).partition("/**/")
    if not deep:
        yield from globbing.iglob(pattern)
    for root in globbing.iglob(before or os.path.sep) if deep else ():
        for folder, _ in _folders(root):
            yield from _expand(os.path.join(globbing.escape(folder), after))


def _folders(root: str, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
    """Yield each directory at and below `root` once, as in `walk`, with the names of its files."""
    top = os.path.realpath(root)
    known = {top}
    for folder, folders, names in os.walk(root, followlinks=True):
        kept = []
        for name in sorted(folders):
            path = os.path.join(folder, name)
            place = os.path.realpath(path)
            inside = os.path.islink(path) and top in (os.path.commonpath([top, place]), place)
            around = os.path.commonpath([top, place]) == place
            hidden = name.startswith(".") or name == "__pycache__" or name in skipped
            if not (hidden or inside or around or place in known):
                known.add(place)
                kept.append(name)
        folders[:] = kept
        yield folder, names


def _check_link(path: str) -> None:
    if os.path.islink(path) and not os.path.exists(path):
        raise ConfigError(f"{path} is a link to {os.readlink(path)}, which does not exist: mend or remove the link")


def _local(path: str, name: str, explicit: bool = False) -> SourceFile:
    _check_link(path)
    try:
        status = os.stat(path)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    return SourceFile(path, name.replace(os.path.sep, "/"), status.st_size, str(status.st_mtime_ns), explicit)


def _not_empty(found: list[SourceFile], path: str, reason: str) -> list[SourceFile]:
    if not found:
        raise ConfigError(f"the data source {path!r} matches no file: {reason}")
    return sorted(found, key=lambda f: f.name)


def _nearest_path(path: str) -> str:
    """Describe, for an error message, the nearest existing parent of a missing path and similar names in it."""
    parts = Path(path).parts
    existing = Path(parts[0])
    missing = ""
    for part in parts[1:]:
        if not (existing / part).exists():
            missing = part
            break
        existing = existing / part
    try:
        names = sorted(n for n in os.listdir(existing) if not n.startswith("."))
    except OSError:
        names = []
    alike = difflib.get_close_matches(missing, names, n=3, cutoff=0.6)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if alike:
        shown = "did you mean " + " or ".join(repr(str(existing / a)) for a in alike) + "?"
    else:
        shown = f"it holds: {listed}" if names else "it is empty or unreadable"
    return f"the nearest existing path is {existing}; {shown}"


def import_fsspec() -> Any:
    """Import fsspec, an optional dependency, or raise an error that says how to install it.

    Raises:
      ConfigError: it is not installed; the message has the command that installs it.
    """
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"reading data from a URL needs fsspec: {EXTRA}") from None
    return fsspec


def _find_remote(path: str) -> list[SourceFile]:
    fsspec = import_fsspec()
    try:
        system, inner = fsspec.core.url_to_fs(path)
        if globbing.has_magic(inner) and not path.startswith(("http://", "https://")):
            names = system.glob(inner)
        elif system.isdir(inner) and not path.startswith(("http://", "https://")):
            names = system.find(inner)
        else:
            names = [inner] if system.exists(inner) else []
        infos = [(n, system.info(n)) for n in names]
    except Exception as e:  # every store raises its own errors: missing library, no network, no credentials
        raise ConfigError(f"cannot list the data source {path!r}: {type(e).__name__}: {e}") from None
    found = []
    for name, info in infos:
        if info.get("type") == "directory":
            continue
        tag = next(
            (
                str(info[k])
                for k in ("etag", "ETag", "md5Hash", "mtime", "LastModified", "updated", "created")
                if info.get(k)
            ),
            "",
        )
        url = name if "://" in name else system.unstrip_protocol(name)
        found.append(SourceFile(url, name, int(info.get("size") or 0), tag, explicit=name == inner))
    return _not_empty(found, path, "nothing at this URL")


@contextmanager
def open_file(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open a data file, local or remote, as a binary stream of its decompressed content.

    Raises:
      ConfigError: its compressed data is broken or cut off; also raised while it is read. It is a pointer of Git LFS.
      JaxstackError: the file is gone or cannot be read.
    """
    try:
        with _open_raw(file) as raw:
            if isinstance(raw, io.BufferedReader) and raw.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
                raise ConfigError(f"{file.path} is a pointer of Git LFS in place of the file: git lfs pull")
            if file.name.lower().endswith(".gz"):
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw), 2**20)
            elif file.name.lower().endswith(".zst"):
                yield io.BufferedReader(_zstd_reader(raw), 2**20)
            else:
                yield raw
    except JaxstackError:
        raise
    except (EOFError, gzip.BadGzipFile) as e:
        raise ConfigError(f"{file.path} is broken or cut off: {e}; get it again") from None
    except OSError as e:
        raise JaxstackError(f"cannot read {file.path}: {e}") from None
    except Exception as e:
        if type(e).__module__.split(".")[0] in ("zlib", "zstandard", "zstd"):
            raise ConfigError(f"{file.path} is broken or cut off: {e}; get it again") from None
        raise


def _open_raw(file: SourceFile) -> Any:
    if "://" in file.path:
        return import_fsspec().open(file.path, "rb").open()
    return open(file.path, "rb")


def _zstd_reader(raw: IO[bytes]) -> io.RawIOBase:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"reading .zst files needs zstandard: {EXTRA}") from None
    # The default limit of the window, 128 MiB, refuses what `zstd --long=28` and larger wrote.
    return _CompleteFrames(zstandard.ZstdDecompressor(max_window_size=2**31), raw)


class _CompleteFrames(io.RawIOBase):
    """Stream of decompressed zstd data which, unlike the library's reader, raises an error if the data is cut off."""

    def __init__(self, decompressor: Any, raw: IO[bytes]):
        self._decompressor = decompressor
        self._raw = raw
        self._frame = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        data = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        data = data or self._raw.read(2**18)
        if not data:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the last zstd frame ends early")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._decompressor.decompressobj()
        self._ready = memoryview(self._frame.decompress(data))
        return True
