"""Rows of a table in host memory on the GPU: gathered by the GPU, against a gather by the CPU and a copy.

    python benchmarks/kernels/host_gather.py                                 # on a GPU: 16 GB of float32 rows
    python benchmarks/kernels/host_gather.py --rows 8000000 --width 128 512 --ids 65536
    python benchmarks/kernels/host_gather.py --tiny                          # tiny sizes; rows go to tiny/

kernel: `host_gather`, which reads pinned memory. numpy: all CPU cores take rows (a thread each), and `jax.device_put`
copies them. torch: `index_select` into pinned memory and an asynchronous copy, if PyTorch is installed. xla, with
--xla: `table[ids]` in `jax.jit` with the table in pinned_host memory. call: nothing is gathered, but one is added to
the ids, which shows how long any call takes. The ids are random, others in every call; all ways are measured in turns
of several calls, and a row has the median. The first call of a turn is reported by itself (`first_milliseconds`):
threads of the way before, such as those of OpenMP, which wait for more work for some milliseconds, may still occupy the
cores. Rows are appended to benchmarks/results/host_gather.jsonl: milliseconds, GB/s of gathered rows, and `speedup`
over the faster of numpy and torch.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.distributed.device_setup import start_devices
from pallas_kernels.host_table.api import host_gather
from pallas_kernels.host_table.table import HostTable

Ids = np.ndarray
"""Row numbers, int32 [N]."""
WORKERS = os.cpu_count() or 1
CALLS = 3
"""Calls of one way in each turn that count, after a first one that does not."""


def kernel_way(table: HostTable) -> Callable[[Ids], Any]:
    """The GPU reads the rows."""
    gather = jax.jit(lambda ids: host_gather(table, ids))
    return lambda ids: gather(ids).block_until_ready()


def call_way() -> Callable[[Ids], Any]:
    """Nothing is gathered: the ids are copied to the device and changed there, as a measure of any call's own time."""
    change = jax.jit(lambda ids: ids + 1)
    return lambda ids: change(ids).block_until_ready()


def numpy_way(table: HostTable) -> Callable[[Ids], Any]:
    """Threads of the CPU take rows, then a copy."""
    pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
    buffers: dict[int, np.ndarray] = {}

    def run(ids: Ids) -> Any:
        out = buffers.setdefault(len(ids), np.empty((len(ids), table.array.shape[1]), table.array.dtype))
        parts = zip(np.array_split(ids, WORKERS), np.array_split(out, WORKERS), strict=True)
        # With the mode "raise" NumPy would gather into a buffer of its own first.
        list(pool.map(lambda part: np.take(table.array, part[0], axis=0, out=part[1], mode="clip"), parts))
        return jax.device_put(out).block_until_ready()

    return run


def torch_way(table: HostTable) -> Callable[[Ids], Any]:
    """PyTorch takes rows into pinned memory, then a copy."""
    import torch

    rows = torch.from_numpy(table.array)
    cuda = torch.cuda.is_available()
    buffers: dict[int, Any] = {}

    def run(ids: Ids) -> Any:
        shape = (len(ids), rows.shape[1])
        out = buffers.setdefault(len(ids), torch.empty(shape, dtype=rows.dtype, pin_memory=cuda))
        torch.index_select(rows, 0, torch.from_numpy(ids), out=out)
        found = out.to("cuda", non_blocking=True) if cuda else out
        if cuda:
            torch.cuda.synchronize()
        return found

    return run


def xla_way(table: HostTable) -> Callable[[Ids], Any]:
    """XLA indexes an array in pinned host memory."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    rows = jax.device_put(table.array, device.with_memory_kind("pinned_host"))
    gather = jax.jit(lambda rows, ids: rows[ids], out_shardings=device)
    return lambda ids: gather(rows, jax.device_put(ids, device.with_memory_kind("pinned_host"))).block_until_ready()


class Seconds(NamedTuple):
    """Median seconds of one way.

    Attributes:
        call: of a call after others of the same way.
        first: of the first call of a turn, right after those of another way, whose threads may still wait for work.
    """

    call: float
    first: float


def measure(ways: dict[str, Callable[[Ids], Any]], rows: int, count: int, turns: int) -> dict[str, Seconds]:
    """Return the median seconds of each way; in each turn, every way has one first call and `CALLS` further ones."""
    random = np.random.default_rng(0)
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):  # the first turn compiles, and touches the buffers
        for name, run in ways.items():
            seconds = []
            for ids in random.integers(0, rows, (1 + CALLS, count), dtype=np.int32):
                began = time.perf_counter()
                run(ids)
                seconds.append(time.perf_counter() - began)
            if turn:
                times[name].append(seconds)
    return {
        name: Seconds(statistics.median(sum((turn[1:] for turn in found), [])), statistics.median(t[0] for t in found))
        for name, found in times.items()
    }


def check(ways: dict[str, Callable[[Ids], Any]], table: HostTable) -> None:
    """Check that all ways return the rows.

    Raises:
        AssertionError: one does not.
    """
    ids = np.random.default_rng(1).integers(0, table.array.shape[0], 100, dtype=np.int32)
    for name, run in ways.items():
        found = run(ids)
        found = found.cpu().numpy() if hasattr(found, "cpu") else np.asarray(found)
        if not np.array_equal(found, table.array[ids]):
            raise AssertionError(f"{name} returned other rows than the table's.")


def measure_width(width: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the results for tables of one width."""
    table = HostTable(args.rows, width, jnp.float32)
    for start in range(0, args.rows, 1 << 20):  # different rows, written fast
        part = table.array[start : start + (1 << 20)]
        part[:] = np.arange(start, start + len(part), dtype=np.float32)[:, None]
    ways = {"kernel": kernel_way(table), "numpy": numpy_way(table)}
    if importlib.util.find_spec("torch") is not None:
        ways["torch"] = torch_way(table)
    if args.xla:
        ways["xla"] = xla_way(table)
    check(ways, table)
    ways["call"] = call_way()
    rows = []
    for count in args.ids:
        seconds = measure(ways, args.rows, count, args.turns)
        fastest = min(seconds[name].call for name in ("numpy", "torch") if name in seconds)
        for name, (found, first) in seconds.items():
            row = {
                "work": f"host gather {count} of {args.rows} rows [{width}] float32", "implementation": name,
                "device": jax.devices()[0].device_kind, "devices": 1, "milliseconds": 1e3 * found,
                "first_milliseconds": 1e3 * first, "cpu_cores": WORKERS, "pinned": table.pinned,
            }  # fmt: skip
            if name != "call":
                row |= {"gigabytes_per_second": count * width * 4 / found / 1e9, "speedup": fastest / found}
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive(int), default=8_000_000, help="rows of the table")
    parser.add_argument("--width", type=positive(int), nargs="+", default=[128, 512], help="elements of a row")
    parser.add_argument("--ids", type=positive(int), nargs="+", default=[16384, 131072], help="rows to gather")
    parser.add_argument("--turns", type=positive(int), default=15, help="measurements of each way")
    parser.add_argument("--xla", action="store_true", help="measure XLA's gather from pinned_host too")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    args = parser.parse_args()
    if args.tiny:
        args.rows = 1000
        args.width = [16]
        args.ids = [64]
        args.turns = 2
    script = f"{SCRATCH}host_gather" if args.tiny else "host_gather"
    require_commit(script)
    start_devices()
    rows = [row for width in args.width for row in measure_width(width, args)]
    append_rows(script, rows)
    print_table(
        rows, ("work", "implementation", "milliseconds", "first_milliseconds", "gigabytes_per_second", "speedup")
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
