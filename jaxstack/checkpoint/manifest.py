"""The manifest of a checkpoint: a hash of every file, written last and checked before every load.

A committed checkpoint directory holds

    SHA256SUMS        one line per file, as `sha256sum -c SHA256SUMS` reads it; its last line is checkpoint.json
    checkpoint.json   step, leaves, extra data, and the size of every other file
    arrays/...        written by Orbax

Every bit is covered: any change in SHA256SUMS itself makes a hash, a name or its last line wrong. Files that neither
of the two lists do not belong to the checkpoint, and are ignored.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

from jaxstack.errors import ConfigError
from jaxstack.files import sync_directory, write_file, write_json

Item = TypeVar("Item")
Result = TypeVar("Result")

MANIFEST = "SHA256SUMS"
INDEX = "checkpoint.json"
FORMAT = 1
_KEYS = {"format": int, "step": int, "saved_at": str, "leaves": dict, "files": dict}
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\0]+)")
_LARGEST_BYTES = 2**28
"""Largest size of an index or a manifest; a longer file is neither, and is not read into memory."""
THREADS = min(8, os.cpu_count() or 1)
"""Threads that read, hash or write files at the same time."""


class Damaged(Exception):
    """Raised if a checkpoint's files have changed since it was committed. The message begins with the file's name."""


def list_files(root: Path) -> list[str]:
    """Return the sorted relative paths of the files below `root`, without hidden files at its top level.

    The hidden ones are parts of a save.
    """
    names = []
    for folder, _, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files]
    return sorted(name for name in names if not name.startswith("."))


def hash_files(root: Path, names: Iterable[str], sync: bool = False) -> dict[str, str]:
    """Return the SHA-256 of each file in hex, computed in several threads.

    Args:
      root: the folder.
      names: files by relative name.
      sync: also flush each file to the disk.

    Raises:
      OSError: a file cannot be read.
    """

    def digest(name: str) -> str:
        with open(root / name, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = list(names)
    return dict(zip(names, in_threads(digest, names), strict=True))


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for each item in up to `THREADS` threads, and return the results in the order of the items.

    Raises:
      Exception: that of the first item for which the function raises one, after the calls that have begun have ended.
    """
    pool = ThreadPoolExecutor(max_workers=THREADS)
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(cancel_futures=True)


def sync_directories(root: Path) -> None:
    """Flush the directory entries of `root` and of all folders below it to the disk (fsync)."""
    for folder, _, _ in os.walk(root):
        sync_directory(Path(folder))


def write_manifest(root: Path, digests: dict[str, str], index: dict[str, Any]) -> None:
    """Complete a checkpoint: write checkpoint.json, with the sizes of the hashed files, then SHA256SUMS."""
    sizes = {name: (root / name).stat().st_size for name in digests}
    write_json(root / INDEX, {**index, "files": sizes})
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    lines.append(f"{hash_files(root, [INDEX])[INDEX]}  {INDEX}\n")
    write_file(root / MANIFEST, "".join(lines).encode())
    sync_directories(root)


def read_index(root: Path) -> dict[str, Any]:
    """Read a checkpoint's checkpoint.json, and check it against the manifest of hashes.

    Raises:
      Damaged: it or the manifest has changed.
    """
    return _read_checked(root)[1]


def signature(root: Path) -> tuple[tuple[str, int, int], ...] | None:
    """Return name, size and modification time of all files of a checkpoint, to detect that somebody wrote to it.

    None if the status of a file cannot be read.
    """
    try:
        stats = [(name, (root / name).stat()) for name in list_files(root)]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def check(
    root: Path,
    step: int,
    share: tuple[int, int] = (0, 1),
    hashes: bool = True,
    names: Collection[str] | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Check a checkpoint's files against the sizes and hashes in its manifest; return the content of checkpoint.json.

    Args:
      root: the checkpoint.
      step: the step that its index must have.
      share: (first, stride) of the files whose content is read, so that several processes can divide the reading.
      hashes: read and compare contents; False: only sizes.
      names: the files to check, where others need not be there; None: all.
      known: name -> SHA-256 in hex of files whose content was hashed when it was stored, which are not read again.

    Raises:
      Damaged: something has changed.
    """
    digests, index = _read_checked(root)
    if index["step"] != step:
        raise Damaged(f"{INDEX}: it belongs to step {index['step']}, not {step}")
    checked = {name: size for name, size in index["files"].items() if names is None or name in names}
    for name, size in checked.items():
        found = _regular(root, name).st_size
        if found != size:
            raise Damaged(f"{name}: {found} bytes, {size} expected")
    if hashes:
        mine = sorted(checked)[share[0] :: share[1]]
        try:
            found_digests = {**hash_files(root, [name for name in mine if name not in known]), **known}
        except OSError as error:
            raise Damaged(f"{error.filename or root}: {error.strerror or error}") from error
        for name in mine:
            if found_digests[name] != digests[name]:
                raise Damaged(f"{name}: it, or its line in {MANIFEST}, has changed (SHA-256 differs)")
    return index


def _regular(root: Path, name: str) -> os.stat_result:
    """Return the status (`os.lstat`) of a file of a checkpoint; raise Damaged unless it is a regular file."""
    try:
        status = os.lstat(root / name)
    except FileNotFoundError:
        raise Damaged(f"{name}: missing") from None
    except OSError as error:
        raise Damaged(f"{name}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{name}: missing, something else than a file stands there")
    return status


def _read_checked(root: Path) -> tuple[dict[str, str], dict[str, Any]]:
    digests = _read_digests(root)
    content = _read_small(root, INDEX)
    if hashlib.sha256(content).hexdigest() != digests[INDEX]:
        raise Damaged(f"{INDEX}: it, or its line in {MANIFEST}, has changed (SHA-256 differs)")
    try:
        index = json.loads(content)
    except (ValueError, RecursionError):
        index = None
    if isinstance(index, dict) and isinstance(index.get("format"), int) and index["format"] != FORMAT:
        raise ConfigError(
            f"{root / INDEX} has format {index['format']}, this jaxstack reads {FORMAT}: use the one that saved it"
        )
    if not _is_index(index):
        raise Damaged(f"{INDEX}: it is not the index of a checkpoint")
    if set(index["files"]) | {INDEX} != set(digests):
        raise Damaged(f"{MANIFEST}: it does not list the files that {INDEX} lists")
    return digests, index


def _is_index(index: object) -> TypeGuard[dict[str, Any]]:
    """Return True if the content of a checkpoint.json has all required keys, also for each leaf."""
    if not isinstance(index, dict) or any(not isinstance(index.get(key), kind) for key, kind in _KEYS.items()):
        return False
    for leaf in index["leaves"].values():
        if not (isinstance(leaf, dict) and isinstance(leaf.get("shape"), list) and isinstance(leaf.get("dtype"), str)):
            return False
        if not (all(isinstance(size, int) for size in leaf["shape"]) and isinstance(leaf.get("key_impl", ""), str)):
            return False
    return True


def _read_small(root: Path, name: str) -> bytes:
    size = _regular(root, name).st_size
    if size > _LARGEST_BYTES:
        raise Damaged(f"{name}: {size} bytes, at most {_LARGEST_BYTES} expected")
    try:
        return (root / name).read_bytes()
    except OSError as error:
        raise Damaged(f"{name}: {error.strerror or 'missing'}") from error


def _read_digests(root: Path) -> dict[str, str]:
    try:
        text = _read_small(root, MANIFEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"{MANIFEST}: not text") from error
    lines = text.split("\n")
    if lines.pop() != "":
        raise Damaged(f"{MANIFEST}: cut short")
    digests = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or ".." in match[2].split("/") or match[2].startswith("/"):
            raise Damaged(f"{MANIFEST}: a line is not a hash and a name below it: {line[:80]!r}")
        digests[match[2]] = match[1]
    if not lines or not lines[-1].endswith("  " + INDEX):
        raise Damaged(f"{MANIFEST}: cut short")
    return digests
