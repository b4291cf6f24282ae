"""Copies batches to the devices of a mesh as sharded global arrays, ahead of their use.

Dimensions: B global batch; arrays are [B, ...] and may be sharded over any of their dims.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxstack.data.batch_source import HostBatch, check_batch
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.parallel.rules import SEQUENCES, AxisRules
from pallas_kernels import sequence_order

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
"""Longest wait of `close` for a read that is under way; the thread is a daemon, so a stalled read cannot keep a program
from ending."""


class BackgroundIterator(Iterator[T], Generic[T]):
    """Reads an iterator in a background thread, up to `depth` items ahead, and yields the items in order.

    An item that is ready is returned at once, even while a later one is still being read. An error of the source is
    raised at its place in the order. The source is closed by the thread that reads it.

    Args:
      source: any iterator.
      depth: items that are read and not yet taken, at most; at least 1.
      name: name of the thread.
    """

    def __init__(self, source: Iterator[T], depth: int, name: str):
        self._source = source
        self._items: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while self._room.acquire() and not self._closed:
                self._items.put((next(self._source),))
        except BaseException as error:  # StopIteration too; the consumer raises it
            self._items.put(error)
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
            self._items.put(StopIteration())

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._room.release()
        return item[0]

    def close(self) -> None:
        """Stop reading; wait for a read that is under way, but only a few seconds."""
        self._closed = True
        self._room.release()
        # A reader that waits for this iterator, in its own thread, sees its end.
        self._items.put(StopIteration())
        self._thread.join(_CLOSE_SECONDS)


class BatchPlacement:
    """Assembles global batches on the devices of a mesh from the rows that each process reads.

    Args:
      rules: how the dims of a batch are split over the mesh.
    """

    def __init__(self, rules: AxisRules):
        self.rules = rules

    def local_rows(self, rows: int) -> np.ndarray:
        """Return the sorted indices of the rows that this process's devices hold of a global batch of `rows` rows."""
        return local_rows(self.rules.sharding(self.rules.batch_spec((rows,))), (rows,))

    def stream(
        self, host: Iterator[HostBatch], rows: int, global_batch_size: int | None
    ) -> Iterator[tuple[dict[str, jax.Array], float]]:
        """Yield batches as sharded arrays on the devices, each with the seconds that the caller waited for it.

        Args:
          host: batches with this process's rows.
          rows: rows of a global batch, which decide the layout.
          global_batch_size: the same, or None if batches differ in their rows (with one process only).
        """
        arranged = (arrange(batch, self.rules) for batch in host)
        return device_batches(arranged, BatchShardings(self.rules, rows), global_batch_size=global_batch_size)

    def put(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Copy a whole global batch to the devices as sharded arrays; every process has all of its rows."""
        rows = len(next(iter(check_batch(batch).values())))
        arranged = arrange(batch, self.rules)
        if jax.process_count() > 1:
            here = self.local_rows(rows)
            arranged = {name: np.asarray(x)[here] for name, x in arranged.items()}
        return _put_batch(arranged, BatchShardings(self.rules, rows), rows)


class BatchShardings:
    """Shardings of the arrays of batches of `rows` rows."""

    def __init__(self, rules: AxisRules, rows: int):
        self._rules = rules
        self._rows = rows

    def of(self, name: str, ndim: int) -> NamedSharding:
        """Return the sharding of an array of `ndim` dims with the given name, such as `tokens`."""
        return self._rules.sharding(self._rules.batch_spec((self._rows, *(1,) * (ndim - 1)), name))


def arrange(batch: HostBatch, rules: AxisRules) -> HostBatch:
    """Reorder the tokens of each sequence for context parallelism, and add their original `positions`.

    Without a `context` axis, or without `tokens`, the batch is returned as it is.

    Raises:
      ConfigError: the length is not divisible into the chunks of that order.
    """
    parts = rules.degree(rules.table["length"])
    if parts == 1 or "tokens" not in batch:
        return batch
    shape = np.shape(batch["tokens"])
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    try:
        order = sequence_order(shape[-1], parts)
    except ValueError as error:
        raise ConfigError(f"parallel.context={parts}: {error}.") from None
    whole = {"positions": positions, **batch}
    axis = len(shape) - 1  # of the tokens
    return {name: np.take(np.asarray(x), order, axis) if name in SEQUENCES else x for name, x in whole.items()}


def abstract_batch(batch: HostBatch, rules: AxisRules, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of a global batch of `rows` rows, given the rows of it that this host reads.

    Raises:
      ConfigError: the devices of the batch axes do not divide the rows.
    """
    check_rows(rows, rules, "train.global_batch_size")
    shardings = BatchShardings(rules, rows)

    def describe(name: str, x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), dtype, sharding=shardings.of(name, np.ndim(x)))

    return {name: describe(name, x) for name, x in arrange(batch, rules).items()}


def check_rows(rows: int, rules: AxisRules, what: str) -> None:
    """Check that `rows` can be split evenly over the devices that the batch dimension is sharded over.

    Raises:
      ConfigError: they do not; the message calls the number `what`, and names the nearest ones that they divide.
    """
    shards = rules.degree(rules.table["batch"])
    if rows % shards:
        below = rows // shards * shards
        raise ConfigError(
            f"{what} ({rows}) must be divisible by the {shards} devices of data x fsdp x expert; nearest: "
            f"{f'{below} or ' if below else ''}{below + shards}."
        )


def local_rows(sharding: Sharding, global_shape: Sequence[int]) -> np.ndarray:
    """Return the sorted indices of the rows (dim 0) that this process's devices hold of an array of `global_shape`."""
    global_shape = tuple(global_shape)
    size = global_shape[0]
    rows = np.zeros(size, bool)
    for index in sharding.addressable_devices_indices_map(global_shape).values():
        assert index is not None
        rows[index[0] if index else slice(None)] = True
    return np.flatnonzero(rows)


def put_rows(sharding: Sharding, rows: np.ndarray, global_shape: tuple[int, ...]) -> jax.Array:
    """Assemble a global array from the rows of every process, without waiting for the copies to the devices.

    Args:
      sharding: of the global array.
      rows: this process's rows, those of `local_rows` in that order.
      global_shape: of the global array.

    Raises:
      JaxstackError: the number of rows is not that of `local_rows`.
    """
    wanted = local_rows(sharding, global_shape)
    if len(wanted) != len(rows):
        raise JaxstackError(f"this process holds {len(wanted)} rows of the global batch, but was given {len(rows)}")
    shards = []
    devices = []
    for device, index in sharding.addressable_devices_indices_map(global_shape).items():
        assert index is not None
        first, last, _ = index[0].indices(global_shape[0]) if index else (0, global_shape[0], 1)
        here = slice(int(np.searchsorted(wanted, first)), int(np.searchsorted(wanted, last)))
        shards.append(rows[(here, *index[1:])])
        devices.append(device)
    arrays = jax.device_put(shards, devices)
    return jax.make_array_from_single_device_arrays(global_shape, sharding, arrays)


def device_batches(
    batches: Iterator[HostBatch], sharding: Sharding | Mapping[str, Sharding] | BatchShardings, *,
    global_batch_size: int | None = None, depth: int = 2, host_depth: int = 4,
) -> Iterator[tuple[dict[str, jax.Array], float]]:  # fmt: skip
    """Yield batches as sharded global arrays, copying `depth` of them to the devices ahead of the one in use.

    One thread reads batches on the host and another starts their copies to the devices, so a batch that is ready never
    waits for a later one.

    Args:
      batches: dicts of arrays with the rows of this process (`local_rows`) in dim 0. They are read in a thread.
      sharding: one for all arrays, or one for each name.
      global_batch_size: B; may be None if one process holds all rows.
      depth: batches that are put on the devices before they are needed, at least 1.
      host_depth: batches that are read ahead of these, at least 1.

    Yields:
      The batch, and the seconds that the caller waited for it.
    """
    host = BackgroundIterator(iter(batches), host_depth, "data-host")
    placed = BackgroundIterator(
        (_put_batch(batch, sharding, global_batch_size) for batch in host), depth, "data-to-device"
    )
    try:
        while True:
            began = time.perf_counter()
            batch = next(placed, None)
            if batch is None:
                return
            yield batch, time.perf_counter() - began
    finally:
        host.close()
        placed.close()


def _put_batch(
    batch: HostBatch, sharding: Sharding | Mapping[str, Sharding] | BatchShardings, global_batch_size: int | None
) -> dict[str, jax.Array]:
    if jax.process_count() == 1:
        return jax.device_put(
            dict(batch), {name: _sharding_of(sharding, name, np.ndim(x)) for name, x in batch.items()}
        )
    placed = {}
    for name, rows in batch.items():
        if global_batch_size is None:
            raise JaxstackError("device_batches needs global_batch_size if there are several processes")
        placed[name] = put_rows(_sharding_of(sharding, name, rows.ndim), rows, (global_batch_size, *rows.shape[1:]))
    return placed


def _sharding_of(sharding: Sharding | Mapping[str, Sharding] | BatchShardings, name: str, ndim: int) -> Sharding:
    if isinstance(sharding, BatchShardings):
        return sharding.of(name, ndim)
    return sharding[name] if isinstance(sharding, Mapping) else sharding
