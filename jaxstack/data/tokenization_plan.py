"""Splits the tokenization of data sources into units of work: large files are cut, small ones are grouped."""

import hashlib
import importlib.util
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxstack.data.config import SourceConfig
from jaxstack.data.read_documents import (
    HEAD_BYTES,
    Kind,
    Piece,
    align,
    documents_needed,
    parquet_groups,
    read_documents,
    split_score,
)
from jaxstack.data.shards import INDEX
from jaxstack.data.source_files import SourceFile, find_files, open_file, walk
from jaxstack.errors import ConfigError

UNIT_BYTES = 4 * 2**20
MOST_UNITS = 8192
KIND_OF_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
RECORD_SUFFIXES = (".csv", ".tsv", ".json")
"""Files of records that have no reader; format auto reads them as plain text, which a note says."""
STDLIB_SUFFIXES = (".py", ".txt", ".rst", ".md")
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"})
STDLIB_GENERATED = ("config-", "pydoc_data/", "_sysconfigdata_")
"""Beginnings of the names of generated files: settings of this machine's build, and the help topics, read as texts."""


@dataclass(frozen=True)
class WorkUnit:
    """A unit of tokenization work: pieces of files to read together, and the rule by which documents are held out."""

    pieces: tuple[Piece, ...]
    fraction: float
    inside: bool
    size: int
    """Approximate number of bytes to read."""


@dataclass(frozen=True)
class TokenizationPlan:
    """The tokenization of some data sources as a list of work units, in the order of the resulting token stream."""

    units: tuple[WorkUnit, ...]
    identity: str
    """SHA-256 of the files' paths, sizes and modification times, and of how they are read."""
    sources: tuple[dict, ...]
    """The description of the sources for index.json."""
    files: tuple[SourceFile, ...] = ()
    """The files of all sources."""

    @property
    def size(self) -> int:
        return sum(u.size for u in self.units)


def make_plan(sources: Sequence[SourceConfig], held_out_fraction: float) -> TokenizationPlan:
    """Plan the tokenization of data sources: list their files, cut long ones into pieces, and group short ones.

    The end of each file of Python's standard library is held out, although it has documents enough to hold out whole
    ones: these would be some 40 files, and the loss would depend on which ones a machine's Python happens to hold out.

    Raises:
      ConfigError: no file matches, a source that cannot be read as its format, a missing text column.
    """
    listed = [(s, source_files(s)) for s in sources]
    total = sum(f.size for _, files in listed for f in files)
    unit_bytes = max(UNIT_BYTES, total // MOST_UNITS)
    units: list[WorkUnit] = []
    described = []
    digest = hashlib.sha256(f"{held_out_fraction!r} {unit_bytes}".encode())
    for source, files in listed:
        kinds: list[Kind] = [_kind(source, f) for f in files]
        needed = documents_needed(held_out_fraction)
        inside = needed > 0 and (source.path == "stdlib" or not _has_documents(source, files, kinds, needed))
        units.extend(_group(source, files, kinds, (held_out_fraction, inside), unit_bytes))
        for file, kind in zip(files, kinds, strict=True):
            digest.update(json.dumps([file.identity(), kind, source.text_key]).encode())
        described.append(
            {
                "path": source.path,
                "files": len(files),
                "bytes": sum(f.size for f in files),
                "text_key": source.text_key,
                "split": "inside documents" if inside else "by document",
                "records_as_text": _records_as_text(source, files, kinds),
            }
        )
    if source_is_stdlib(sources):
        digest.update(f"{platform.python_version()} inside documents".encode())
    files = tuple(file for _, files in listed for file in files)
    return TokenizationPlan(tuple(units), digest.hexdigest(), tuple(described), files)


def source_is_stdlib(sources: Sequence[SourceConfig]) -> bool:
    return any(s.path == "stdlib" for s in sources)


def source_files(source: SourceConfig) -> list[SourceFile]:
    """Return a text source's files, sorted by relative path; for Python's standard library, help topics come last."""
    if source.path == "synthetic":
        raise ConfigError("the source 'synthetic' has no text: it needs no preparation, train on it as it is")
    if source.path != "stdlib":
        found = find_files(source.path)
        if {INDEX, "train-00000.bin"} <= {f.name.rsplit("/", 1)[-1] for f in found}:
            raise ConfigError(
                f"{source.path!r} holds prepared token shards, not text: give the directory itself "
                "as a local path to train on, with format auto or tokens"
            )
        return found
    root = sysconfig.get_path("stdlib")
    found = []
    for path in walk(root, STDLIB_SKIPPED):
        name = os.path.relpath(path, root).replace(os.path.sep, "/")
        if name.endswith(STDLIB_SUFFIXES) and not name.startswith(STDLIB_GENERATED):
            status = os.stat(path)
            found.append(SourceFile(path, name, status.st_size, str(status.st_mtime_ns)))
    if not found:
        raise ConfigError(
            f"this Python keeps no sources of its standard library in {root}; give data.sources another path"
        )
    found.sort(key=lambda f: f.name)
    topics = importlib.util.find_spec("pydoc_data") and importlib.util.find_spec("pydoc_data.topics")
    if topics and topics.origin and os.path.isfile(topics.origin):
        status = os.stat(topics.origin)
        found.append(SourceFile(topics.origin, "pydoc_data/topics", status.st_size, str(status.st_mtime_ns)))
    return found


def _kind(source: SourceConfig, file: SourceFile) -> Kind:
    if source.path == "stdlib":
        return "topics" if file.name == "pydoc_data/topics" else "text"
    if source.format in ("text", "jsonl", "parquet"):
        return source.format
    return KIND_OF_SUFFIX.get(file.suffix, "text")


def _records_as_text(source: SourceConfig, files: Sequence[SourceFile], kinds: Sequence[Kind]) -> dict[str, int]:
    """Count, by suffix, the files of records (csv, tsv, json) that are read as plain text for lack of a reader."""
    if source.format == "text":
        return {}
    suffixes = [file.suffix for file, kind in zip(files, kinds, strict=True) if kind == "text"]
    return {suffix: suffixes.count(suffix) for suffix in RECORD_SUFFIXES if suffix in suffixes}


def _has_documents(source: SourceConfig, files: list[SourceFile], kinds: list[Kind], needed: int) -> bool:
    """Return True if the source has at least `needed` documents; reads no more than needed to decide."""
    count = kinds.count("text")
    if "topics" in kinds:
        count += 50
    for file, kind in zip(files, kinds, strict=True):
        if count >= needed:
            return True
        if kind == "parquet":
            count += sum(rows for rows, _ in parquet_groups(file, source.text_key))
        elif kind == "jsonl":
            for _ in read_documents(Piece("jsonl", file, source.text_key)):
                count += 1
                if count >= needed:
                    return True
    return count >= needed


def _group(
    source: SourceConfig,
    files: list[SourceFile],
    kinds: list[Kind],
    split: tuple[float, bool],
    unit_bytes: int,
) -> Iterator[WorkUnit]:
    """Group the pieces of a source's files into work units of about `unit_bytes`, in order."""
    pending: list[Piece] = []
    size = 0
    for file, kind in zip(files, kinds, strict=True):
        for piece, piece_bytes in _pieces(source, file, kind, split, unit_bytes):
            if pending and size + piece_bytes > unit_bytes:
                yield WorkUnit(tuple(pending), *split, size)
                pending = []
                size = 0
            pending.append(piece)
            size += piece_bytes
    if pending:
        yield WorkUnit(tuple(pending), *split, size)


def _pieces(
    source: SourceConfig, file: SourceFile, kind: Kind, split: tuple[float, bool], unit_bytes: int
) -> Iterator[tuple[Piece, int]]:
    key = source.text_key
    if kind == "parquet":
        yield from _parquet_pieces(file, key, unit_bytes)
    elif kind == "topics" or file.compressed or file.size <= 2 * unit_bytes:
        yield Piece(kind, file, key), file.size
    elif kind == "jsonl":
        cuts = _cuts(file, 0, file.size, unit_bytes, whole_lines=True)
        for start, stop in zip(cuts, cuts[1:], strict=False):
            yield Piece("jsonl", file, key, start, stop), stop - start
    else:
        yield from _long_text(file, split, unit_bytes)


def _cuts(file: SourceFile, start: int, stop: int, step: int, whole_lines: bool = False) -> list[int]:
    """Return byte offsets, mostly line ends, that cut `start` to `stop` of a file into ranges of about `step` bytes."""
    with open_file(file) as stream:
        inner = [align(stream, p, file.size, whole_lines) for p in range(start + step, stop - step // 2, step)]
    return sorted({start, stop, *(p for p in inner if start < p < stop)})


def _long_text(file: SourceFile, split: tuple[float, bool], unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    """Cut a long text file into byte ranges for the training and the held-out split; yield each with its size.

    Only the first range of each split opens a document.
    """
    fraction, inside = split
    with open_file(file) as stream:
        score = split_score(stream.read(HEAD_BYTES) + str(file.size).encode())
        border = align(stream, int(file.size * (1 - fraction)), file.size) if inside else 0
    if not inside:
        border = 0 if score < fraction else file.size
    for side, start, stop in (("train", 0, border), ("held_out", border, file.size)):
        if start == stop:
            continue
        cuts = _cuts(file, start, stop, unit_bytes)
        for a, b in zip(cuts, cuts[1:], strict=False):
            yield Piece("text", file, "text", a, b, a == start, side, score), b - a  # pyright: ignore


def _parquet_pieces(file: SourceFile, key: str, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    first = size = 0
    groups = parquet_groups(file, key)
    for i, (_, group_bytes) in enumerate(groups):
        size += group_bytes
        if size >= unit_bytes or i == len(groups) - 1:
            yield Piece("parquet", file, key, first, i + 1), size
            first = i + 1
            size = 0
