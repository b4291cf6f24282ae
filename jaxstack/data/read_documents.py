"""Reads documents from pieces of files: whole texts, ranges of long ones, jsonl lines, parquet rows, pydoc topics."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Literal

from jaxstack.data.source_files import EXTRA, SourceFile, open_file
from jaxstack.data.tokenizer import replace_lone_surrogates
from jaxstack.errors import ConfigError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16, either of which opens a text."""
Kind = Literal["text", "jsonl", "parquet", "topics"]
Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Piece:
    """A part of a data source, such as a byte range of a file, that can be read independently of the others."""

    kind: Kind
    file: SourceFile
    text_key: str = "text"
    start: int = 0
    """First byte (text, jsonl) or row group (parquet)."""
    stop: int | None = None
    """End of the range, exclusive; None: the end of the file."""
    opens: bool = True
    """False: a later range of a long text, which continues the document of the range before."""
    split: Split | None = None
    """Side of the split of the whole piece; None: decided for each document."""
    score: float | None = None
    """Split score of the long text that this is a range of."""


@dataclass
class Document:
    """Text of a document, or of one part of a long document; `opens` is True for the first part."""

    text: str
    opens: bool = True
    replaced: int = 0
    """Number of invalid UTF-8 sequences that became U+FFFD."""
    skipped: bool = False
    """True for a file that is not text; `text` is empty then."""
    empty: bool = False
    """True for a record without a text (null, or an empty string); `text` is empty then."""


def read_documents(piece: Piece) -> Iterator[Document]:
    """Yield the documents of a piece of a data source in order; those without text are marked `skipped` or `empty`.

    Raises:
      ConfigError: a jsonl line or a parquet file without `text_key`, or a value there that is not a string.
      ConfigError: broken data; the message names the file.
      JaxstackError: a file that cannot be read, perhaps only now.
    """
    reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "topics": _read_topics}[piece.kind]
    for document in reader(piece):
        if document.text or document.skipped or document.empty:
            yield document


def _read_text(piece: Piece) -> Iterator[Document]:
    with open_file(piece.file) as stream:
        if piece.stop is None:
            raw = stream.read()
        else:
            stream.seek(piece.start)
            raw = stream.read(piece.stop - piece.start)
    if b"\0" in raw[:8192] and piece.opens:
        if piece.file.explicit:
            _refuse_utf_16(raw, piece.file)
            raise ConfigError(f"{piece.file.path} is not text (it contains NUL bytes); give text, jsonl or parquet")
        yield Document("", skipped=True)
        return
    text, replaced = decode_utf8(raw.removeprefix(BYTE_ORDER_MARK) if piece.opens else raw)
    if replaced > len(text) // 10 and piece.opens and not piece.file.explicit:
        yield Document("", skipped=True)
        return
    yield Document(text, piece.opens, replaced)


def _refuse_utf_16(raw: bytes, file: SourceFile) -> None:
    if raw.startswith(UTF_16):
        raise ConfigError(f"{file.path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 IN > OUT")


def decode_utf8(raw: bytes) -> tuple[str, int]:
    """Decode UTF-8; return the text and the number of invalid sequences that were replaced by U+FFFD."""
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        return text, text.count("\ufffd") - raw.count("\ufffd".encode())


def align(stream: IO[bytes], position: int, size: int, whole_lines: bool = False) -> int:
    """Return the first byte offset at or after `position` where a text file can be cut: just after a line end.

    Unless `whole_lines`, a text without a line end in the next MiB is cut before a character.
    """
    if position <= 0 or position >= size:
        return min(max(position, 0), size)
    stream.seek(position - 1)
    at = position
    while window := stream.read(2**20):
        line_end = window.find(b"\n")
        if line_end >= 0:
            return at + line_end
        if not whole_lines:
            return next((position + i for i, b in enumerate(window[1:5]) if b & 0xC0 != 0x80), position)
        at += len(window)
    return size


def _read_jsonl(piece: Piece) -> Iterator[Document]:
    for record, replaced, where in read_records(piece):
        yield _document(record, replaced, where, piece.text_key)


def read_records(piece: Piece) -> Iterator[tuple[dict, int, str]]:
    """Yield (object, number of invalid UTF-8 sequences, text that names file and line) for each line of a jsonl file.

    Raises:
      ConfigError: a line is not a JSON object; the message names it.
    """
    with open_file(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start)
        at = piece.start
        number = 0
        while piece.stop is None or at < piece.stop:
            line = stream.readline()
            if not line:
                return
            number += 1
            if at == 0:
                _refuse_utf_16(line, piece.file)
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                where = f"line {number}" if not piece.start else f"the line at byte {at}"
                place = f"{piece.file.path}, {where}"
                yield *_parse_line(line, place), place
            at = stream.tell() if piece.stop is not None else at + 1


def _parse_line(line: bytes, where: str) -> tuple[dict, int]:
    decoded, replaced = decode_utf8(line)
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as e:
        cut = "; the line is cut off" if e.pos >= len(decoded.rstrip()) else ""
        raise ConfigError(f"{where} is not JSON: {e.msg} at character {e.pos + 1}{cut}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} is not JSON: {e}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is a JSON {type(record).__name__}, not an object with a text")
    return record, replaced


def _document(record: dict, replaced: int, where: str, text_key: str) -> Document:
    if text_key not in record:
        keys = ", ".join(repr(k) for k in record) or "none"
        chat = "; for chats set format to chat" if {"messages", "completion"} & record.keys() else ""
        raise ConfigError(
            f"{where} has no key {text_key!r}; its keys: {keys}; set text_key to the one with the text{chat}"
        )
    text = record[text_key]
    if text is None or text == "":
        return Document("", empty=True)
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_key!r} is {type(text).__name__}, not a string; set text_key to the text")
    return Document(replace_lone_surrogates(text), replaced=replaced)


def import_parquet():
    """Import pyarrow.parquet, an optional dependency, or raise an error that says how to install it.

    Raises:
      ConfigError: it is not installed; the message has the command that installs it.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"reading parquet files needs pyarrow: {EXTRA}") from None
    return parquet


def parquet_groups(file: SourceFile, text_key: str) -> list[tuple[int, int]]:
    """Return (rows, bytes) of every row group of a parquet file, after checking its text column.

    Raises:
      ConfigError: there is no column `text_key`, or it does not hold strings.
    """
    parquet = import_parquet()
    with open_file(file) as stream, _parquet_errors(file):
        reader = parquet.ParquetFile(stream)
        names = reader.schema_arrow.names
        if text_key not in names:
            raise ConfigError(
                f"{file.path} has no column {text_key!r}; its columns: {', '.join(map(repr, names))}; set text_key"
            )
        kind = str(reader.schema_arrow.field(text_key).type)
        if "string" not in kind or kind.startswith(("list", "struct", "map")):
            raise ConfigError(f"{file.path}: column {text_key!r} holds {kind}, not strings; set text_key to the text")
        meta = reader.metadata
        return [(meta.row_group(i).num_rows, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups)]


@contextmanager
def _parquet_errors(file: SourceFile) -> Iterator[None]:
    """Context manager that converts Arrow's errors to a ConfigError that names the parquet file."""
    try:
        yield
    except Exception as e:
        if type(e).__module__.startswith("pyarrow"):
            raise ConfigError(f"{file.path} is not a whole parquet file: {e}; get it again") from None
        raise


def _read_parquet(piece: Piece) -> Iterator[Document]:
    parquet = import_parquet()
    with open_file(piece.file) as stream, _parquet_errors(piece.file):
        reader = parquet.ParquetFile(stream)
        stop = reader.metadata.num_row_groups if piece.stop is None else piece.stop
        groups = list(range(piece.start, stop))
        # The reader takes `a.b` for the field b of a struct a too, so that it may return more than the column.
        for batch in reader.iter_batches(row_groups=groups, columns=[piece.text_key], batch_size=1024):
            for text in batch.column(piece.text_key).to_pylist():
                yield Document(text or "", empty=not text)


def _read_topics(piece: Piece) -> Iterator[Document]:
    """Yield Python's built-in help topics (`pydoc_data.topics`), one document each."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(topics[name])


HEAD_BYTES = 2**16
EXPECTED_DOCUMENTS = 8


def split_score(content: bytes) -> float:
    """Hash a text's bytes to a number in [0, 1), which decides whether the document is held out."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def documents_needed(fraction: float) -> int:
    """Return how many documents a source needs so that holding out a random `fraction` almost certainly selects some.

    With an expectation of 8 held-out documents there are none with probability e^-8, about 3 in 10,000.
    """
    return math.ceil(EXPECTED_DOCUMENTS / fraction) if 0 < fraction < 1 else 0


def split_document(document: Document, piece: Piece, fraction: float, inside: bool) -> list[tuple[Split, str, float]]:
    """Return (split, text, score) of each part of a document: all of it in one split, or only its end held out.

    Args:
      document: the document, or a range of it.
      piece: the piece that it was read from, which can decide the side and the score.
      fraction: share that is held out.
      inside: hold out the last `fraction` of the document, from a line end on; False: the document's score decides for
        all of it.

    Returns:
      (split, text, score) of each part.
    """
    score = piece.score if piece.score is not None else split_score(document.text.encode())
    if piece.split is not None:
        return [(piece.split, document.text, score)]
    if not inside or fraction in (0, 1):
        return [("held_out" if score < fraction else "train", document.text, score)]
    cut = int(len(document.text) * (1 - fraction))
    line_end = document.text.find("\n", cut)
    cut = line_end + 1 if 0 <= line_end < len(document.text) - 1 else cut
    parts: list[tuple[Split, str, float]] = [
        ("train", document.text[:cut], score), ("held_out", document.text[cut:], score)
    ]  # fmt: skip
    return [p for p in parts if p[1]]
