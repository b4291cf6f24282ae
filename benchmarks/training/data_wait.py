"""Seconds that training steps wait for data from a slow reader.

    python benchmarks/training/data_wait.py
    python benchmarks/training/data_wait.py --steps 300 --step-ms 100 --only "one stalled file"
    python benchmarks/training/data_wait.py --brief  # processes only where Python is the slow part

The shards are behind a storage with a simulated delay. A batch takes two steps to read, and the storage serves four
batches at a time, so that it needs half a step per batch on average:

    latency           every batch takes two steps
    bursts            the storage serves nothing for six steps, then eight batches at a time for the next six
    one stalled file  as latency; and the reads of one file of 64 all hang for ten steps
    decoding          no delay, but half a step of pure Python per batch, which holds the interpreter's lock
    heavy decoding    one and a half steps of pure Python per batch, too much for one interpreter; needs 3 or more cores

Each is read by one thread four batches ahead, by the default number of threads, and by two and four processes. Steps
are a jitted chain of matmuls of about --step-ms; the unit above is their median with batches in memory.
`wait_fraction` is the time that the loop waited for its next batch, over the time of all steps, after the first batch;
`filled_wait_fraction` is the same without the first batches, as many as are read ahead, while all workers begin at
once and the first batches become ready together. `slowdown` is the time of the steps over that with batches in memory.
Every batch is compared with the one that a serial reader without delays returns.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.data.augmentations.base import Augmenter, Vocabulary
from jaxstack.data.config import DataConfig
from jaxstack.data.mixture import row_order
from jaxstack.data.read_batches import Batch, TrainingBatches, WorkerOptions, read_batches
from jaxstack.data.shard_files import LocalFiles
from jaxstack.data.shards import ShardWriter, TokenStream
from jaxstack.data.token_rows import TextRows

ROWS = 8
LENGTH = 256
SHARDS = 64
SHARD_TOKENS = 2**14
START = 0
_DEFAULT = DataConfig()
WORKERS = {
    "1 thread, 4 ahead": WorkerOptions(threads=1, processes=0, ahead=4),
    f"{_DEFAULT.read_threads} threads": WorkerOptions(_DEFAULT.read_threads, 0, _DEFAULT.read_ahead),
    "2 processes x 8 threads": WorkerOptions(8, 2, _DEFAULT.read_ahead),
    "4 processes x 4 threads": WorkerOptions(4, 4, _DEFAULT.read_ahead),
}
COLUMNS = (
    "work", "implementation", "device", "wait_fraction", "filled_wait_fraction", "slowdown", "milliseconds",
    "longest_wait_steps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a storage delays reads; all times are in steps."""

    latency: float = 0.0
    """Duration of reading a batch."""
    at_once: int = 4
    """Batches that are served at the same time."""
    closed: float = 0.0
    """Nothing is served for this long, and then normally for as long again."""
    stall: tuple[float, float] = (0.0, 0.0)
    """Reads of the first shard hang between these times."""
    decoding: float = 0.0
    """Pure Python per batch."""


WORKS = {
    "latency": Storage(latency=2.0),
    "bursts": Storage(latency=2.0, at_once=8, closed=6.0),
    "one stalled file": Storage(latency=2.0, stall=(40.0, 50.0)),
    "decoding": Storage(decoding=0.5),
    "heavy decoding": Storage(decoding=1.5),
}


class SlowStream:
    """A token stream behind a `Storage`. Each process of several has its share of the storage's capacity."""

    def __init__(self, stream: TokenStream, storage: Storage, step: float, began: float, processes: int):
        self._arguments = (stream, storage, step, began, processes)
        self._stream = stream
        self._storage = storage
        self._step = step
        self._began = began
        self._free = [0.0] * max(storage.at_once // max(processes, 1), 1)
        self._lock = threading.Lock()
        self.tokens = stream.tokens
        self.document_start = stream.document_start
        self.hashes = stream.hashes

    def __reduce__(self) -> tuple[Any, ...]:
        return SlowStream, self._arguments

    def read(self, start: int, count: int) -> np.ndarray:
        """Read a row: one of ROWS of a batch."""
        storage = self._storage
        step = self._step
        if start < SHARD_TOKENS and storage.stall[0] <= self._now() < storage.stall[1]:
            time.sleep((storage.stall[1] - self._now()) * step)
        if storage.latency:
            time.sleep(max(self._served() - self._now(), 0.0) * step)
        end = time.thread_time() + storage.decoding * step / ROWS
        while time.thread_time() < end:
            sum(range(100))
        return self._stream.read(start, count)

    def _served(self) -> float:
        """Return when the storage will have served a request made now; requests are served in their order."""
        storage = self._storage
        with self._lock:
            begin = max(self._now(), min(self._free))
            if storage.closed and (into := begin % (2 * storage.closed)) < storage.closed:
                begin += storage.closed - into
            end = begin + storage.latency / ROWS
            self._free[self._free.index(min(self._free))] = end
        return end

    def _now(self) -> float:
        """Return the time in steps."""
        return (time.time() - self._began) / self._step

    def close(self) -> None:
        self._stream.close()


def write_shards(folder: Path) -> TokenStream:
    """Return a stream of random ids with a document start about every 100 ids."""
    random = np.random.default_rng(0)
    writer = ShardWriter(folder, "train", np.dtype("<u2"), SHARD_TOKENS)
    ids = random.integers(1, 1000, SHARDS * SHARD_TOKENS)
    writer.append(np.where(random.random(ids.shape) < 0.01, START, ids))
    return TokenStream(LocalFiles(folder), writer.finish(), np.dtype("<u2"), SHARD_TOKENS, START)


def batches_of(stream: Any) -> TrainingBatches:
    """Return all batches of a stream, as a run orders and packs them."""
    rows = TextRows(stream, LENGTH, packing=True)
    augment = Augmenter.make((), Vocabulary(START, 1000), 0, packing=True, chats=False)
    order = cast(Sequence[tuple[int, int]], row_order([rows.count], [1.0], 0, True))
    return TrainingBatches(order, [rows], range(ROWS), ROWS, 0, augment)


def make_step(milliseconds: float) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return a jitted (state, batch) -> state that takes about `milliseconds`, and the first state."""
    import jax
    import jax.numpy as jnp

    size = 4096 if jax.default_backend() == "gpu" else 256
    matrix = jax.random.normal(jax.random.key(0), (size, size)) / size**0.5

    def chain(count: int) -> Callable[[Any, Any], Any]:
        def step(x: Any, batch: Any) -> Any:
            x = x + 1e-9 * jnp.mean(batch["tokens"].astype(jnp.float32))
            return jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ matrix), x)

        return jax.jit(step)

    example = {"tokens": jnp.zeros((ROWS, LENGTH), jnp.int32)}
    count = 16
    for _ in range(3):
        step = chain(count)
        step(matrix, example).block_until_ready()
        times = []
        for _ in range(7):
            began = time.perf_counter()
            step(matrix, example).block_until_ready()
            times.append(time.perf_counter() - began)
        count = max(round(count * milliseconds / 1e3 / statistics.median(times)), 1)
    step = chain(count)
    step(matrix, example).block_until_ready()
    return step, matrix


def run_steps(step: Callable[[Any, Any], Any], state: Any, source: Iterator[Batch], steps: int) -> dict[str, Any]:
    """Run a loop like a trainer's, with two steps in flight; return its times and the tokens of all batches."""
    import jax

    from jaxstack.data.device_batches import device_batches

    batches = cast(Generator, device_batches(source, jax.sharding.SingleDeviceSharding(jax.devices()[0])))
    flying = []
    waits = []
    asked = []
    tokens = []
    times = [0.0]
    with contextlib.closing(batches):
        for batch, waited in batches:
            asked.append(time.perf_counter() - waited)
            if not tokens:  # the first batch has nothing to hide behind
                times = [time.perf_counter()]
                waited = 0.0
            elif len(flying) == 2:
                flying.pop(0).block_until_ready()
                times.append(time.perf_counter())
            state = step(state, batch)
            flying.append(state)
            waits.append(waited)
            tokens.append(batch["tokens"])
            if len(tokens) == steps:
                break
    for one in flying:
        one.block_until_ready()
    end = time.perf_counter()
    return {
        "seconds": end - times[0], "waits": waits, "asked": asked, "end": end,
        "tokens": [np.asarray(one) for one in tokens], "median_step": statistics.median(np.diff(times)),
    }  # fmt: skip


def wait_fractions(found: dict[str, Any], ahead: int) -> dict[str, float | None]:
    """Return the share of the time that the loop waited: in all, and from batch `ahead` on, if there are more.

    Args:
        found: result of `run_steps`.
        ahead: batches that are read ahead.
    """
    waits = found["waits"]
    asked = found["asked"]
    later = sum(waits[ahead:]) / (found["end"] - asked[ahead]) if len(waits) > ahead else None
    return {"wait_fraction": sum(waits) / found["seconds"], "filled_wait_fraction": later}


def cases(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the pairs of a storage and a kind of workers to measure."""
    pairs = [(work, name) for work in args.only or WORKS for name in WORKERS]
    if not args.brief:
        return pairs
    _, threads, _, processes = WORKERS
    return [(work, name) for work, name in pairs if name == threads or (name == processes and WORKS[work].decoding)]


def measure(args: argparse.Namespace, stream: TokenStream) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of storage and workers."""
    import jax

    step, state = make_step(args.step_ms)
    serial = batches_of(stream)
    expected = [serial[number] for number in range(args.steps)]
    run_steps(step, state, iter(expected[:4]), 4)  # compiles for batches as `device_batches` places them
    memory = run_steps(step, state, iter(expected), args.steps)
    seconds = memory["median_step"]
    for work, name in cases(args):
        workers = WORKERS[name]
        # The storage's clock begins when the first reads do, processes need some seconds to start.
        began = time.time() + (8.0 if workers.processes else 0.0)
        slow = SlowStream(stream, WORKS[work], seconds, began, workers.processes)
        found = run_steps(step, state, read_batches(batches_of(slow), workers), args.steps)
        for got, batch in zip(found["tokens"], expected, strict=True):
            np.testing.assert_array_equal(got, batch["tokens"])
        yield {
            "work": f"data wait: {work}", "implementation": f"jaxstack, {name}",
            "device": jax.devices()[0].device_kind, "devices": 1, "cores": len(os.sched_getaffinity(0)),
            **wait_fractions(found, workers.ahead),
            "slowdown": found["seconds"] / memory["seconds"], "milliseconds": 1e3 * found["median_step"],
            "memory_milliseconds": 1e3 * seconds, "longest_wait_steps": max(found["waits"]) / seconds,
            "steps": args.steps,
            "storage": dataclasses.asdict(WORKS[work]), "workers": dataclasses.asdict(workers),
        }  # fmt: skip


def main() -> None:
    """Measures, prints a table and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive(int), default=200, help="per measurement")
    parser.add_argument("--step-ms", type=positive(float), default=50.0, help="duration of a step, about")
    parser.add_argument("--only", nargs="+", choices=list(WORKS), help="kinds of storage; default: all")
    parser.add_argument("--brief", action="store_true", help="default threads only, and processes for decoding")
    parser.add_argument("--tiny", action="store_true", help="few short steps, which measure nothing")
    args = parser.parse_args()
    script = "data_wait"
    if args.tiny:
        args.steps = 12
        args.step_ms = 5.0
        script = SCRATCH + script
    require_commit(script)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, write_shards(Path(folder))):
            print(f"{row['work']}, {row['implementation']}: {row['wait_fraction']:.2%}", flush=True)
            rows.append(row)
            append_rows(script, rows[-1:])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
