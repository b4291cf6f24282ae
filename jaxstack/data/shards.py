"""Token shards on disk: files of fixed length with a SHA-256 each, written atomically, verified before use.

A prepared directory contains `index.json`, `tokenizer/` and, for each split, `<split>-00000.bin` and so on: one stream
of token ids cut into files of `shard_tokens` ids (the last may be shorter), uint16 or uint32, little endian, without a
header.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.data.shard_files import LocalFiles, ShardFiles
from jaxstack.errors import JaxstackError
from jaxstack.files import write_file, write_json

FORMAT = "jaxstack-tokens"
VERSION = 1
INDEX = "index.json"
STAMPS = ".verified.json"


class ShardWriter:
    """Writes a stream of token ids as shard files, each of which becomes visible once it is complete on the disk."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int,
        on_shard: Callable[[list[dict]], None] | None = None, done: Iterable[dict] = (),
    ):  # fmt: skip
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._on_shard = on_shard
        self.shards: list[dict] = list(done)
        self._parts: list[np.ndarray] = []
        self._count = 0

    def append(self, ids: np.ndarray) -> None:
        """Append token ids to the stream, and write every shard that becomes full."""
        while ids.size:
            room = self._shard_tokens - self._count
            self._parts.append(ids[:room])
            self._count += min(room, ids.size)
            ids = ids[room:]
            if self._count == self._shard_tokens:
                self._write()

    def finish(self) -> list[dict]:
        """Write the remaining token ids as the last shard; return name, tokens and sha256 of every shard."""
        if self._count:
            self._write()
        return self.shards

    def _write(self) -> None:
        name = f"{self._split}-{len(self.shards):05d}.bin"
        content = np.concatenate(self._parts).astype(self._dtype).tobytes()
        write_file(self._folder / name, content)
        self.shards.append({"name": name, "tokens": self._count, "sha256": hashlib.sha256(content).hexdigest()})
        self._parts = []
        self._count = 0
        if self._on_shard:
            self._on_shard(self.shards)


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check the index.json of a directory of token shards.

    Raises:
      JaxstackError: it is missing, not one of ours, of a later version, or inconsistent.
    """
    path = folder / INDEX
    try:
        return parse_index(path.read_bytes(), path)
    except FileNotFoundError:
        raise JaxstackError(f"{folder} holds no prepared tokens ({INDEX} is missing): run jaxstack.prepare") from None
    except OSError as e:
        raise JaxstackError(f"{path} is not readable: {e}") from None


def parse_index(content: bytes, path: object) -> dict[str, Any]:
    """Parse and check the content of an index.json, which lists the token shards of a directory.

    Args:
      content: of the file.
      path: its path or URL, for messages.

    Raises:
      JaxstackError: it is not one of ours, of a later version, or inconsistent.
    """
    try:
        index = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise JaxstackError(f"{path} is not readable: {e}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise JaxstackError(f"{path} is not an index of token shards: its format is not {FORMAT!r}")
    if index.get("version") != VERSION:
        raise JaxstackError(f"{path} has version {index.get('version')}, this jaxstack reads {VERSION}: update it")
    try:
        if index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype {index['dtype']!r}")
        if not isinstance(index["tokenizer"]["hash"], str):
            raise ValueError("tokenizer hash")
        for split in ("train", "held_out"):
            _check_split(index["splits"][split], index["shard_tokens"])
    except (KeyError, TypeError, ValueError) as e:
        raise JaxstackError(f"{path} is damaged: {type(e).__name__}: {e}; prepare the data again") from None
    return index


def _check_split(split: dict, shard_tokens: int) -> None:
    sizes = [s["tokens"] for s in split["shards"]]
    if any(not isinstance(n, int) or not 0 < n <= shard_tokens for n in sizes):
        raise ValueError("shard sizes")
    if any(n != shard_tokens for n in sizes[:-1]) or sum(sizes) != split["tokens"]:
        raise ValueError("shard sizes do not add up")
    for shard in split["shards"]:
        if os.path.basename(shard["name"]) != shard["name"] or not shard["name"].endswith(".bin"):
            raise ValueError(f"shard name {shard['name']!r}")
        if len(bytes.fromhex(shard["sha256"])) != 32:
            raise ValueError("shard hash")


def verify_shards(folder: Path, shards: list[dict], item_size: int) -> None:
    """Check the size of every shard, and its SHA-256 unless this same file passed before.

    A file in the directory records which shards passed, by size, modification time, change time and inode. If the
    directory cannot be written, every start computes the hashes again (1 to 2 GB/s per core).

    Raises:
      JaxstackError: a shard is missing, or has another size or other content; the message names it.
    """
    stamps = _read_stamps(folder)
    pending = []
    for shard in shards:
        path = folder / shard["name"]
        try:
            status = os.stat(path)
        except OSError as e:
            raise JaxstackError(f"token shard {path} cannot be read ({e.strerror}); {_way_out(folder)}") from None
        expected = shard["tokens"] * item_size
        if status.st_size != expected:
            raise JaxstackError(
                f"token shard {path} has {status.st_size} bytes, its index says {expected} "
                f"({shard['tokens']} ids of {item_size} bytes): it was cut off or replaced; " + _way_out(folder)
            )
        stamp = [shard["sha256"], status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if stamps.get(shard["name"]) != stamp:
            pending.append((path, shard["sha256"]))
            stamps[shard["name"]] = stamp
    if pending:
        with ThreadPoolExecutor(min(len(pending), os.cpu_count() or 1)) as pool:
            for _ in pool.map(lambda p: _verify_hash(*p), pending):
                pass
        _write_stamps(folder, stamps)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _verify_hash(path: Path, expected: str) -> None:
    try:
        found = file_sha256(path)
    except OSError as e:
        raise JaxstackError(f"token shard {path} cannot be read: {e}") from None
    if found != expected:
        raise JaxstackError(
            f"token shard {path} is corrupt: SHA-256 {found[:12]}.., its index says {expected[:12]}..; "
            + _way_out(path.parent)
        )


def _way_out(folder: Path) -> str:
    return f"restore the file, or delete {folder} and prepare the data again"


def _read_stamps(folder: Path) -> dict:
    try:
        stamps = json.loads((folder / STAMPS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _write_stamps(folder: Path, stamps: dict) -> None:
    try:
        write_json(folder / STAMPS, stamps)
    except OSError:
        return  # a read-only directory: the next start computes the hashes again


class TokenStream:
    """Token ids of one split, read by position from shard files. Safe to use from several threads; picklable.

    Args:
      files: where the shards are.
      shards: name, tokens and sha256 of each.
      dtype: of the ids.
      shard_tokens: ids in each shard but the last.
      document_start: the id that opens a document.
    """

    def __init__(self, files: ShardFiles, shards: list[dict], dtype: np.dtype, shard_tokens: int, document_start: int):
        self._files = files
        self._shards = shards
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self.document_start = document_start
        self.tokens = sum(s["tokens"] for s in shards)

    @property
    def hashes(self) -> list[str]:
        return [s["sha256"] for s in self._shards]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from position `start` on, fewer at the end of the stream, in the dtype of the shards."""
        stop = min(start + count, self.tokens)
        size = self._dtype.itemsize
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            length = min(stop - start, self._shard_tokens - offset)
            content = self._files.read(self._shards[shard]["name"], offset * size, length * size)
            parts.append(np.frombuffer(content, self._dtype))
            start += length
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self._dtype)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._files.close()


def open_split(folder: Path, index: dict[str, Any], split: str) -> TokenStream:
    """Verify the shards of a split ("train" or "held_out") in a local directory, and open them as one stream."""
    shards = index["splits"][split]["shards"]
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    verify_shards(folder, shards, dtype.itemsize)
    return TokenStream(LocalFiles(folder), shards, dtype, index["shard_tokens"], index["tokenizer"]["document_start"])


_RECORDS = {
    ".csv": "commas and quotes included: convert to jsonl or parquet for one document per row",
    ".tsv": "tabs included: convert to jsonl or parquet for one document per row",
    ".json": "braces and keys included: set format=jsonl if each line is an object, convert it otherwise",
}
"""Suffix of a file of records -> what reading it as text means, and the way out."""


def describe_altered_inputs(index: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each kind of input (such as invalid UTF-8) that was changed or left out of the shards."""
    empty = "without text (null or empty)"
    rows = (
        ("replaced_characters", "invalid UTF-8 sequence", "invalid UTF-8 sequences", "became U+FFFD"),
        ("skipped_files", "file that is not text", "files that are not text", "left out"),
        ("empty_documents", f"document {empty}", f"documents {empty}", "left out"),
    )
    notes = []
    for key, one, several, fate in rows:
        if count := index.get(key):
            verb = "" if fate.startswith("became") else "was " if count == 1 else "were "
            notes.append(f"{count:,} {one if count == 1 else several} {verb}{fate}")
    for source in index.get("sources", ()):
        for suffix, count in source.get("records_as_text", {}).items():
            read = f"{count:,} {suffix} file{'s' * (count > 1)} {'was' if count == 1 else 'were'} read as plain text"
            notes.append(f"{read}, {_RECORDS[suffix]}; format=text accepts that")
    return notes
