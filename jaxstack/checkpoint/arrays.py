"""Reads and writes dicts of named arrays with Orbax, asynchronously and as a few uncompressed files.

Orbax logs one failed write with tracebacks by up to four of its threads, asyncio once for each leaf, and TensorStore
once for each leaf that fails after Orbax has closed its event loop. `silence_orbax` drops these messages, as the caller
gets the error as an exception. Messages of asyncio about other code's tasks are not filtered.
"""

import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

# Switched off, so that nobody opens a port for metrics by accident.
os.environ["ENABLE_ORBAX_PROMETHEUS_TELEMETRY"] = "false"


_ITEM = "state"
_MEBIBYTE = 2**20
_GIBIBYTE = 2**30


def _context(timeout_seconds: int) -> ocp.Context:
    context = ocp.Context()
    context.asynchronous.timeout_secs = timeout_seconds
    # With asynchronous creation, a folder that cannot be created leaves threads that wait for it until the timeout.
    context.asynchronous.create_directories_asynchronously = False
    saving = context.array.saving
    # OCDBT stores any number of leaves in a few files: as fast as a folder per leaf for few leaves, twice as fast for
    # hundreds. No zstd: saving takes two to four times as long, for 8 % fewer bytes with random-looking weights.
    saving.use_ocdbt = True
    saving.use_zarr3 = True
    saving.use_compression = False
    # Small chunks: another mesh reads only what it needs. Files of bounded size: they are hashed in parallel.
    saving.storage_options.chunk_byte_size = 64 * _MEBIBYTE
    saving.ocdbt_target_data_file_size = 256 * _MEBIBYTE
    # memory.transfer_concurrent_bytes stays unset: with it, arrays are copied from the device after `save_async` has
    # returned, when the next step may have overwritten them.
    return context


def start_write(path: Path, arrays: dict[str, Any], timeout_seconds: int) -> Callable[[], None]:
    """Copy arrays to host memory, and start writing them to disk in the background.

    When this returns, the arrays may be donated, changed or deleted.

    Args:
      path: folder of the arrays, which must not exist.
      arrays: jax or numpy arrays by name.
      timeout_seconds: limit on the whole write.

    Returns:
      A function that waits until everything is written, and raises if that failed.
    """
    silence_orbax(_ITEM)
    if not arrays:
        return lambda: None
    largest = max(_local_bytes(array) for array in arrays.values())
    context = _context(timeout_seconds)
    context.memory.write_concurrent_bytes = max(_GIBIBYTE, largest + 1)
    with context:
        response = ocp.save_async(str(path), arrays, checkpointable_name=_ITEM)
    return response.result


def read(path: Path, targets: dict[str, Any], timeout_seconds: int) -> dict[str, Any]:
    """Read the wanted arrays from disk; each device reads only its own shards.

    Args:
      path: folder of the arrays.
      targets: jax.ShapeDtypeStruct with a sharding, or a numpy array, for each name that is wanted.
      timeout_seconds: limit on the whole read.
    """
    silence_orbax(_ITEM)
    if not targets:
        return {}
    largest = max(math.prod(target.shape) * np.dtype(target.dtype).itemsize for target in targets.values())
    context = _context(timeout_seconds)
    context.memory.read_concurrent_bytes = max(_GIBIBYTE, 2 * largest + 1)
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load(str(path), targets, checkpointable_name=_ITEM)


def _local_bytes(array: jax.Array | np.ndarray) -> int:
    """Return the size in bytes of the largest shard of an array on this process."""
    if isinstance(array, jax.Array):
        return max((shard.data.nbytes for shard in array.addressable_shards), default=0)
    return array.nbytes


_ORBAX = os.sep.join(("", "orbax", "checkpoint", ""))
_STARTERS = ("asyncio", "concurrent")
_CLOSED = "Event loop is closed"
_NOT_AWAITED = r"coroutine 'async_(de)?serialize\w*\.<locals>\.\w+' was never awaited"


def silence_orbax(item: str) -> None:
    """Silence the log messages of Orbax, and those of TensorStore about files below a folder named `item`."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _WithoutOrbax) for known in logger.filters):
            logger.addFilter(_WithoutOrbax(item))
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)
    warnings.filterwarnings("ignore", _NOT_AWAITED, RuntimeWarning)


class _WithoutOrbax(logging.Filter):
    def __init__(self, item: str):
        super().__init__()
        self._tensorstore = re.compile(rf"[A-Z_]+: .*/{re.escape(item)}/", re.DOTALL)

    def filter(self, record: logging.LogRecord) -> bool:
        if _ORBAX in record.pathname:
            return False
        if record.name != "asyncio":
            return True
        # For a task without an exception, asyncio's message names the file of its function.
        return not (self._is_theirs(record.exc_info[1]) if record.exc_info else _ORBAX in record.getMessage())

    def _is_theirs(self, error: BaseException | None) -> bool:
        for frame, _ in traceback.walk_tb(error.__traceback__ if error else None):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package not in _STARTERS:
                # A user's task that failed inside Orbax has the user's code as its first frame.
                return package == "orbax"
        # Raised by no Python code: TensorStore sets the future's exception, with the text of a C++ status.
        return isinstance(error, ValueError) and bool(self._tensorstore.match(str(error)))


class _WithoutClosedLoops:
    """Replacement of `sys.unraisablehook` that drops TensorStore's errors about an event loop that Orbax has closed."""

    def __init__(self, before: "Callable[[sys.UnraisableHookArgs], object]"):
        self._before = before

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not self._is_theirs(unraisable):
            self._before(unraisable)

    @staticmethod
    def _is_theirs(unraisable: "sys.UnraisableHookArgs") -> bool:
        if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != _CLOSED or unraisable.object:
            return False
        frames = traceback.extract_tb(unraisable.exc_traceback, limit=1)
        # No Python function called it: it runs in a C++ thread.
        return bool(frames) and frames[0].name == "call_soon_threadsafe"
