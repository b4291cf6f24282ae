"""Tokenizes data sources into a directory of token shards, for `jaxstack.prepare` and for the data cache.

The sources are cut into work units that depend on the input alone. Each unit is tokenized into separate files under
`.work/`, by any process and in any order; the units' order then makes the token stream. The result therefore does not
depend on the number of workers, and after a kill the finished shards and units are verified and kept.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxstack.data.config import SourceConfig
from jaxstack.data.load_tokenizer import load_tokenizer
from jaxstack.data.shards import FORMAT, INDEX, VERSION, ShardWriter, read_index, verify_shards
from jaxstack.data.tokenization_plan import TokenizationPlan, WorkUnit, make_plan
from jaxstack.data.tokenize_documents import (
    UnitResult,
    initialize_worker,
    read_result,
    token_file,
    tokenize_in_worker,
    tokenize_unit,
)
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import exclusive, write_json, writing_to

WORK = ".work"
PROGRESS = "progress.json"
TOKENIZER = "tokenizer"
READ_BYTES = 2**24
UNITS_PER_WORKER = 4
"""Smallest number of units per worker process, which takes a second to start."""


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class BuildOptions:
    """Options for tokenizing text into shard files: shard size, number of processes, and progress reports."""

    shard_tokens: int = 2**24
    workers: int = 1
    """Largest number of processes; little text takes fewer. 1: tokenize in this process, with the tokenizer's own
    threads. On two cores that is as fast; on 32 cores its threads slow each other down (260 s for 130 MB, against 8 s
    with 12 processes)."""
    report: Callable[[str], None] = lambda message: None
    """Called with a line of text when something takes time or deserves notice."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the number of input bytes read so far, and their total."""


def prepare_tokens(
    sources: Sequence[SourceConfig], output: Path, tokenizer: Tokenizer, held_out_fraction: float,
    options: BuildOptions | None = None,
) -> dict:  # fmt: skip
    """Tokenize `sources` into shard files in `output`, or continue where an earlier call was stopped.

    Args:
      sources: what to tokenize.
      output: the directory of shards.
      tokenizer: turns text into ids.
      held_out_fraction: share of the documents in the split "held_out": 0 none, 1 all.
      options: how to write.

    Returns:
      The index of the directory, as in index.json.

    Raises:
      ConfigError: a source cannot be read as configured, or `output` holds other data.
      JaxstackError: broken input, a full disk, or another process that writes to `output`.
    """
    plan = make_plan(sources, held_out_fraction)
    return build(plan, Path(output), tokenizer, options or BuildOptions())


def build_key(plan: TokenizationPlan, tokenizer: Tokenizer, shard_tokens: int) -> str:
    """Return a hash of everything that determines the shards: sources, tokenizer and shard size."""
    return hashlib.sha256(f"{VERSION} {plan.identity} {tokenizer.hash} {shard_tokens}".encode()).hexdigest()


def build(plan: TokenizationPlan, output: Path, tokenizer: Tokenizer, options: BuildOptions) -> dict:
    """Tokenize the work units of a plan into shard files in the directory `output`; see `prepare_tokens`."""
    key = build_key(plan, tokenizer, options.shard_tokens)
    with writing_to(output), exclusive(output / ".lock"):
        if (output / INDEX).exists():
            return _finished(output, key, options)
        return _Builder(plan, output, tokenizer, options, key).run()


def _finished(output: Path, key: str, options: BuildOptions) -> dict:
    index = read_index(output)
    if index.get("key") != key:
        raise ConfigError(
            f"{output} already holds tokens of other sources, files, tokenizer or options: "
            "choose another output directory, or delete this one"
        )
    for split in index["splits"].values():
        verify_shards(output, split["shards"], np.dtype(index["dtype"]).itemsize)
    shutil.rmtree(output / WORK, ignore_errors=True)
    options.report(f"{output} is already prepared and complete")
    return index


class _Builder:
    def __init__(self, plan: TokenizationPlan, output: Path, tokenizer: Tokenizer, options: BuildOptions, key: str):
        self._plan = plan
        self._output = output
        self._tokenizer = tokenizer
        self._options = options
        self._key = key
        self._work = output / WORK
        self._results: list[UnitResult] = []
        self._dropped = 0
        self._dropped_tokens = 0

    def run(self) -> dict:
        done = self._earlier_shards()
        self._tokenizer.save(self._output / TOKENIZER)
        self._work.mkdir(exist_ok=True)
        train = ShardWriter(
            self._output,
            "train",
            self._tokenizer.dtype,
            self._options.shard_tokens,
            self._save_progress,
            done,
        )
        finished = sum(s["tokens"] for s in done)
        end = read = 0
        for i, result in enumerate(self._all_results(finished)):
            self._results.append(result)
            begin = end
            end = end + result.train.tokens
            if end > finished:
                self._append_unit(i, max(finished - begin, 0), train)
            committed = sum(s["tokens"] for s in train.shards)
            self._drop_consumed(committed)
            read += self._plan.units[i].size
            self._options.progress(read, self._plan.size)
        shards = {"train": train.finish(), "held_out": self._write_held_out()}
        if not any(shards.values()):
            raise ConfigError(f"the sources hold no text: {', '.join(s['path'] for s in self._plan.sources)}")
        index = self._index(shards)
        write_json(self._output / INDEX, index)
        for split in shards.values():
            verify_shards(self._output, split, self._tokenizer.dtype.itemsize)
        shutil.rmtree(self._work, ignore_errors=True)
        return index

    def _base(self, unit: int) -> Path:
        return self._work / f"unit-{unit:06d}"

    def _append_unit(self, unit: int, start: int, writer: ShardWriter) -> None:
        """Append the training token ids of a work unit, from position `start` on, to the shards being written."""
        dtype = self._tokenizer.dtype
        with open(token_file(self._base(unit), "train"), "rb") as f:
            f.seek(start * dtype.itemsize)
            while content := f.read(READ_BYTES):
                writer.append(np.frombuffer(content, dtype))

    def _earlier_shards(self) -> list[dict]:
        """Return the leading training shards that an interrupted run left complete and intact; delete all others."""
        try:
            progress = json.loads((self._work / PROGRESS).read_bytes())
        except (OSError, ValueError):
            progress = {}
        shards: list[dict] = []
        if self._work.exists() and progress.get("key") == self._key:
            for shard in progress["shards"]:
                try:
                    verify_shards(self._output, [shard], self._tokenizer.dtype.itemsize)
                except JaxstackError as e:
                    self._options.report(f"redone: {e}")
                    break
                shards.append(shard)
            self._options.report(f"continues an interrupted run: {len(shards)} shards are kept")
        elif progress:
            self._options.report(f"{self._output} held unfinished tokens of other input; they are deleted")
        kept = {s["name"] for s in shards}
        for stray in [*self._output.glob("train-*.bin"), *self._output.glob("held_out-*.bin")]:
            if stray.name not in kept:
                stray.unlink()
        for stray in [*self._output.glob(".*.tmp"), *self._work.glob(".*.tmp")]:
            stray.unlink()
        return shards

    def _save_progress(self, shards: list[dict]) -> None:
        write_json(self._work / PROGRESS, {"key": self._key, "shards": shards})

    def _all_results(self, finished: int) -> Iterator[UnitResult]:
        """Yield the tokenization result of every work unit in order, without repeating what an earlier run finished.

        Args:
          finished: number of tokens at the start of the training stream that are in shards already.
        """
        known: dict[int, UnitResult] = {}
        end = 0
        leading = True
        for i in range(len(self._plan.units)):
            result = read_result(self._base(i), self._key, needs_train=False)
            leading = leading and result is not None
            end += result.train.tokens if result else 0
            if result and not (leading and end <= finished):
                result = read_result(self._base(i), self._key, needs_train=True)
            if result:
                known[i] = result
        missing = [(i, u) for i, u in enumerate(self._plan.units) if i not in known]
        fresh = self._tokenize(missing)
        for i in range(len(self._plan.units)):
            yield known[i] if i in known else next(fresh)

    def _tokenize(self, missing: list[tuple[int, WorkUnit]]) -> Iterator[UnitResult]:
        workers = min(self._options.workers, len(missing) // UNITS_PER_WORKER)
        if workers <= 1:
            for i, unit in missing:
                yield tokenize_unit(unit, self._tokenizer, self._key, self._base(i))
            return
        folder = str(self._output / TOKENIZER)
        load_tokenizer(folder)  # fails here, with one message, and not in every worker
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=initialize_worker, initargs=(folder,))
        try:
            running: list[Future] = []
            for i, unit in missing:
                running.append(pool.submit(tokenize_in_worker, unit, self._key, str(self._base(i))))
                if len(running) >= 2 * workers:
                    yield running.pop(0).result()
            while running:
                yield running.pop(0).result()
        except BrokenProcessPool:
            raise JaxstackError(
                "a tokenizing process was killed (out of memory?): run again to continue, or prepare the "
                "text first by `python -m jaxstack.prepare` with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _drop_consumed(self, committed: int) -> None:
        """Delete the token files of work units whose training tokens are all in shards on the disk."""
        while self._dropped < len(self._results):
            end = self._dropped_tokens + self._results[self._dropped].train.tokens
            if end > committed:
                return
            token_file(self._base(self._dropped), "train").unlink(missing_ok=True)
            self._dropped += 1
            self._dropped_tokens = end

    def _write_held_out(self) -> list[dict]:
        """Write the held-out documents in the order of their hashes, so that any prefix is a fair sample."""
        places = []
        for unit, result in enumerate(self._results):
            offset = 0
            for number, (score, tokens) in enumerate(result.held_out_parts):
                places.append((score, unit, number, offset, tokens))
                offset += tokens
        writer = ShardWriter(self._output, "held_out", self._tokenizer.dtype, self._options.shard_tokens)
        size = self._tokenizer.dtype.itemsize
        for _, unit, _, offset, tokens in sorted(places):
            with open(token_file(self._base(unit), "held_out"), "rb") as f:
                f.seek(offset * size)
                writer.append(np.frombuffer(f.read(tokens * size), self._tokenizer.dtype))
        return writer.finish()

    def _index(self, shards: dict[str, list[dict]]) -> dict:
        splits = {}
        for name, files in shards.items():
            counts = [r.train if name == "train" else r.held_out for r in self._results]
            splits[name] = {
                "tokens": sum(s["tokens"] for s in files),
                "documents": sum(c.documents for c in counts),
                "bytes": sum(c.bytes for c in counts),
                "shards": files,
            }
        t = self._tokenizer
        return {
            "format": FORMAT,
            "version": VERSION,
            "key": self._key,
            "dtype": t.dtype.name,
            "shard_tokens": self._options.shard_tokens,
            "tokenizer": {
                "kind": t.kind,
                "vocab_size": t.vocab_size,
                "document_start": t.document_start,
                "hash": t.hash,
            },
            "splits": splits,
            "sources": list(self._plan.sources),
            "replaced_characters": sum(r.replaced for r in self._results),
            "skipped_files": sum(r.skipped_files for r in self._results),
            "empty_documents": sum(r.empty_documents for r in self._results),
        }
