"""Lets processes compile at the same time and measure one after the other, by means of a lock on a file.

Compiling a train step takes far longer than measuring it, and one process uses few of the host's cores. A process holds
a shared lock on the file that `BENCHMARK_TURNS` names while it compiles, and an exclusive one while it measures. So the
first measurement starts when all processes have compiled, and the others follow one by one. XLA's autotuning times
kernels during compilation, here while other processes use the GPU too: it may choose kernels that are slightly slower.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

VARIABLE = "BENCHMARK_TURNS"
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of processes that share GPUs: memory is taken as it is needed."""


class Turn:
    """Lock of this process: shared from the start, while it compiles; exclusive once `wait` has returned."""

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def wait(self) -> None:
        """Wait until no other process compiles or measures; this process is then the only one until it ends."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Give up the turn, as the end of the process does."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def turns() -> Iterator[dict[str, str]]:
    """Yield the environment variables of processes that take turns, with a new lock file if there is none yet."""
    if known := os.environ.get(VARIABLE):
        yield {VARIABLE: known, **SHARED_GPU}
        return
    with tempfile.NamedTemporaryFile(prefix="turns-") as file:
        yield {VARIABLE: file.name, **SHARED_GPU}


def run_together(calls: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
    """Run all calls in threads of their own; yield (index, result) of each as soon as it returns."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        futures = {pool.submit(call): index for index, call in enumerate(calls)}
        for future in as_completed(futures):
            yield futures[future], future.result()
