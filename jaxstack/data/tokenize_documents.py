"""Tokenizes the documents of one work unit into token files, in this process or in a worker process."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from jaxstack.data.load_tokenizer import load_tokenizer
from jaxstack.data.read_documents import Split, read_documents, split_document
from jaxstack.data.shards import file_sha256
from jaxstack.data.tokenization_plan import WorkUnit
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.files import write_json

BATCH_CHARACTERS = 2**22


@dataclass
class SplitCounts:
    """Tokens, documents and bytes of a work unit in one split (training or held-out), and its token file's hash."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    sha256: str = ""


@dataclass
class UnitResult:
    """Result of tokenizing a work unit, stored as JSON next to its token files."""

    key: str
    train: SplitCounts = field(default_factory=SplitCounts)
    held_out: SplitCounts = field(default_factory=SplitCounts)
    held_out_parts: list[tuple[float, int]] = field(default_factory=list)
    """(score, tokens) of every held-out document, in order."""
    replaced: int = 0
    skipped_files: int = 0
    empty_documents: int = 0
    """Number of records whose text is null or an empty string."""


def read_split_documents(unit: WorkUnit, counts: UnitResult) -> Iterator[tuple[Split, str, bool, float]]:
    """Yield (split, text, whether it opens a document, split score) of a work unit's documents; update `counts`."""
    for piece in unit.pieces:
        for document in read_documents(piece):
            counts.replaced += document.replaced
            counts.skipped_files += document.skipped
            counts.empty_documents += document.empty
            if document.text:
                for split, text, score in split_document(document, piece, unit.fraction, unit.inside):
                    yield split, text, document.opens, score


class _TokenFile:
    """Writer of a file of token ids that computes its SHA-256; the file is valid once a stored result has this hash."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `finish`
        self._dtype = dtype
        self._digest = hashlib.sha256()

    def append(self, ids: np.ndarray) -> None:
        content = ids.astype(self._dtype).tobytes()
        self._digest.update(content)
        self._file.write(content)

    def finish(self) -> str:
        """Flush the file to the disk and return its SHA-256."""
        with self._file as f:
            f.flush()
            os.fsync(f.fileno())
        return self._digest.hexdigest()


def tokenize_unit(unit: WorkUnit, tokenizer: Tokenizer, key: str, base: Path) -> UnitResult:
    """Tokenize a work unit into `base`.train.bin and `base`.held_out.bin; `base`.json, written last, marks success."""
    result = UnitResult(key)
    counts = {"train": result.train, "held_out": result.held_out}
    files = {split: _TokenFile(token_file(base, split), tokenizer.dtype) for split in counts}
    for parts in _batched(read_split_documents(unit, result)):
        encoded = tokenizer.encode_documents([text for _, text, _, _ in parts])
        for (split, text, opens, score), ids in zip(parts, encoded, strict=True):
            if opens:
                ids = np.concatenate([np.array([tokenizer.document_start], np.int32), ids])
            files[split].append(ids)
            counts[split].tokens += ids.size
            counts[split].documents += opens
            counts[split].bytes += len(text.encode())
            if split == "held_out":
                result.held_out_parts.append((score, ids.size))
    for split, file in files.items():
        counts[split].sha256 = file.finish()
    write_json(base.with_suffix(".json"), asdict(result))
    return result


Part = tuple[Split, str, bool, float]


def _batched(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Group document parts into lists of a few MB, to bound memory and keep all threads of a tokenizer busy."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def token_file(base: Path, split: str) -> Path:
    """Return the path of the file with the token ids of one split (train or held_out) of a work unit."""
    return base.with_suffix(f".{split}.bin")


def read_result(base: Path, key: str, needs_train: bool) -> UnitResult | None:
    """Read the result of an earlier `tokenize_unit`; None if it is incomplete or made from other inputs (`key`)."""
    try:
        stored = json.loads(base.with_suffix(".json").read_bytes())
        result = UnitResult(
            stored["key"], SplitCounts(**stored["train"]), SplitCounts(**stored["held_out"]),
            [(float(s), int(n)) for s, n in stored["held_out_parts"]],
            stored["replaced"], stored["skipped_files"], stored["empty_documents"],
        )  # fmt: skip
        if result.key != key or file_sha256(token_file(base, "held_out")) != result.held_out.sha256:
            return None
        if needs_train and file_sha256(token_file(base, "train")) != result.train.sha256:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result


_worker_tokenizer: Tokenizer | None = None


def initialize_worker(tokenizer_folder: str) -> None:
    """Prepare a tokenizing worker process: use one tokenizer thread, and exit as soon as the parent process dies."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent stops a run
    parent = multiprocessing.parent_process()
    threading.Thread(target=_exit_with_parent, args=(parent.pid if parent else 0,), daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer_folder)


def _exit_with_parent(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(0.5)
    os._exit(1)


def tokenize_in_worker(unit: WorkUnit, key: str, base: str) -> UnitResult:
    """Tokenize a work unit in a worker process, which `initialize_worker` has prepared."""
    assert _worker_tokenizer is not None, "initialize_worker runs first"
    return tokenize_unit(unit, _worker_tokenizer, key, Path(base))


def sample_texts(units: tuple[WorkUnit, ...], budget: int) -> Iterator[str]:
    """Yield about `budget` characters of training text, in equal amounts from work units spread over the sources."""
    quota = max(budget // max(len(units), 1), 2**16)
    step = max(1, len(units) * quota // budget)
    counts = UnitResult("")
    for unit in units[::step]:
        left = quota
        for split, text, _, _ in read_split_documents(unit, counts):
            if split == "train" and left > 0:
                yield text[:left]
                left -= len(text)
            if left <= 0:
                break
