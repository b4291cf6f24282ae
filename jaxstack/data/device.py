"""Puts the rows of each process on its devices ahead of use.

Dimensions: B global batch; arrays are [B, ...] and may be sharded over any of their dims.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Sharding

from jaxstack.errors import JaxstackError

HostBatch = Mapping[str, np.ndarray]


def local_rows(sharding: Sharding, global_shape: tuple[int, ...]) -> np.ndarray:
    """The rows (dim 0) of an array of `global_shape` that the devices of this process hold, sorted."""
    size = global_shape[0]
    rows = np.zeros(size, bool)
    for index in sharding.addressable_devices_indices_map(global_shape).values():
        assert index is not None
        rows[index[0] if index else slice(None)] = True
    return np.flatnonzero(rows)


def put_rows(sharding: Sharding, rows: np.ndarray, global_shape: tuple[int, ...]) -> jax.Array:
    """A global array from the rows of this process, those of `local_rows` in that order. Returns before the
    copy ends.

    Raises:
      JaxstackError: another number of rows than the sharding places here.
    """
    wanted = local_rows(sharding, global_shape)
    if len(wanted) != len(rows):
        raise JaxstackError(f"this process holds {len(wanted)} rows of the global batch, but was given {len(rows)}")
    shards, devices = [], []
    for device, index in sharding.addressable_devices_indices_map(global_shape).items():
        assert index is not None
        first, last, _ = index[0].indices(global_shape[0]) if index else (0, global_shape[0], 1)
        here = slice(int(np.searchsorted(wanted, first)), int(np.searchsorted(wanted, last)))
        shards.append(rows[(here, *index[1:])])
        devices.append(device)
    arrays = jax.device_put(shards, devices)
    return jax.make_array_from_single_device_arrays(global_shape, sharding, arrays)


def device_batches(
    batches: Iterator[HostBatch], sharding: Sharding | Mapping[str, Sharding], *,
    global_batch_size: int | None = None, depth: int = 2,
) -> Iterator[tuple[dict[str, jax.Array], float]]:  # fmt: skip
    """Global arrays of the batches, `depth` of them on the devices ahead of the one in use.

    Args:
      batches: dicts of arrays with the rows of this process (`local_rows`) in dim 0.
      sharding: one for all keys, or one a key.
      global_batch_size: B; may be left out where one process holds every row.
      depth: batches put on the devices before they are asked for, at least 1.

    Yields:
      the batch, and the seconds for which the caller waited for it: reading on the host and starting the
        copies.
    """
    source = iter(batches)
    ready: deque[dict[str, jax.Array]] = deque()

    def fill() -> None:
        while len(ready) < depth:
            batch = next(source, None)
            if batch is None:
                return
            ready.append(_put_batch(batch, sharding, global_batch_size))

    try:
        while True:
            began = time.perf_counter()
            fill()
            if not ready:
                return
            batch = ready.popleft()
            yield batch, time.perf_counter() - began
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _put_batch(
    batch: HostBatch, sharding: Sharding | Mapping[str, Sharding], global_batch_size: int | None
) -> dict[str, jax.Array]:
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), {k: _of(sharding, k) for k in batch})
    placed = {}
    for key, rows in batch.items():
        if global_batch_size is None:
            raise JaxstackError("device_batches needs global_batch_size where there are several processes")
        placed[key] = put_rows(_of(sharding, key), rows, (global_batch_size, *rows.shape[1:]))
    return placed


def _of(sharding: Sharding | Mapping[str, Sharding], key: str) -> Sharding:
    return sharding[key] if isinstance(sharding, Mapping) else sharding
