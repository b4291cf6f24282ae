"""Reads batches in parallel with Grain's threads or processes, in the order of a serial reader."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

os.environ["ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY"] = "false"  # Grain would listen on every interface

import grain
import numpy as np
from absl import flags

from jaxstack.data.augmentations.base import Augmenter
from jaxstack.data.batch_source import HostBatch, check_batch
from jaxstack.data.token_rows import Row, Rows
from jaxstack.errors import JaxstackError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Number of Grain's threads and processes that read batches, and how far they read ahead."""

    threads: int
    """Reading threads, in each process."""
    processes: int
    """Reading processes; 0: threads of this process."""
    ahead: int
    """Batches that are read before they are asked for."""


class IndexedBatches(Protocol):
    """Interface of a Grain data source whose item i is batch i; picklable for reader processes, and thread-safe."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class TrainingBatches:
    """Endless data source for Grain whose item i is this process's rows of global training batch `start` + i.

    Attributes:
      order: global sample -> (source, row).
      sources: the rows of each source.
      picked: rows of the global batch to read.
      global_batch_size: B.
      start: number of the first batch.
      augment: applied to each row.
    """

    order: Sequence[tuple[int, int]]
    sources: Sequence[Rows]
    picked: Sequence[int]
    global_batch_size: int
    start: int
    augment: Augmenter

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        first = (self.start + int(index)) * self.global_batch_size
        return _stacked([self._row(first + row) for row in self.picked])

    def _row(self, sample: int) -> Row:
        source, row = self.order[sample]
        return self.augment(self.sources[source].read(row), sample)

    def __repr__(self) -> str:
        return f"training batches from {self.start}"


@dataclasses.dataclass(frozen=True)
class HeldOutBatches:
    """Data source for Grain whose item i is this process's rows of held-out batch i.

    Attributes:
      places: (rows, number of the row, limit of their labels) of each sample.
      picked: rows of each batch to read.
      batch_size: rows of a batch over all processes; those after the last sample have no labels.
    """

    places: Sequence[tuple[Rows, int, int]]
    picked: Sequence[int]
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.places) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        samples = (int(index) * self.batch_size + row for row in self.picked)
        nothing = (self.places[0][0], 0, 0)
        chosen = (self.places[i] if i < len(self.places) else nothing for i in samples)
        return _stacked([rows.read(row, limit) for rows, row, limit in chosen])

    def __repr__(self) -> str:
        return f"{len(self)} held-out batches"


def read_batches(batches: IndexedBatches, workers: WorkerOptions) -> Iterator[Batch]:
    """Yield all batches in order, read ahead by Grain's workers, which stop when the iterator is closed or dropped.

    A worker reads a whole batch, so that a slow read delays one batch and not those after it. The batches are those of
    a serial reader for any number of workers.

    Raises:
      JaxstackError: a reading process died; or as reading a batch raises.
    """
    processes = min(workers.processes, len(batches))
    ahead = -(-workers.ahead // max(processes, 1))
    options = grain.ReadOptions(num_threads=min(workers.threads, ahead), prefetch_buffer_size=ahead)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(options)
    if processes:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, which only programs started by absl.app parse
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=1))
    iterator = iter(dataset)
    try:
        yield from iterator
    except RuntimeError as error:
        if "Worker process was terminated" not in str(error):
            raise
        raise JaxstackError(
            f"a process that reads data died ({error}); out of memory? Lower data.read_processes or data.read_ahead, "
            "or set data.read_processes to 0 to read in threads."
        ) from None
    finally:
        iterator.close()


class ParallelBatches:
    """Training data for `Trainer`: batches from a user's function of the step, which threads call many steps ahead.

    Example: `Trainer(module, loss, ParallelBatches(read_batch, threads=32))`.

    Args:
      function: step -> a dict of arrays [B, ...]; it is called in several threads at the same time, in any order, and
        depends on the step alone.
      threads: calls at the same time.
      ahead: batches that are read before they are needed.
    """

    def __init__(self, function: Callable[[int], HostBatch], *, threads: int = 16, ahead: int = 32):
        self._function = function
        self._workers = WorkerOptions(threads, 0, ahead)

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[Batch]:
        """Yield endlessly the rows at indices `rows` of the batches that the function returns, from number `start`."""
        return read_batches(_FunctionBatches(self._function, rows, global_batch_size, start), self._workers)

    def batch(self, number: int, *, global_batch_size: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows at indices `rows` of batch number `number`, read in the calling thread."""
        return _FunctionBatches(self._function, rows, global_batch_size, number)[0]


@dataclasses.dataclass(frozen=True)
class _FunctionBatches:
    """Data source for Grain: item i has the rows `rows` of the batch that a user's function returns for `start` + i."""

    function: Callable[[int], HostBatch]
    rows: Sequence[int] | np.ndarray
    global_batch_size: int
    start: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        whole = check_batch(self.function(self.start + int(index)), self.global_batch_size)
        return {name: np.asarray(value)[self.rows] for name, value in whole.items()}


def _stacked(rows: Sequence[Row]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
