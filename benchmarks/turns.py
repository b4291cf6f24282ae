"""Lets processes compile at the same time and measure one after the other, by means of a lock on a file.

Compiling a train step takes far longer than measuring it, and one process uses few of the host's cores. A process holds
a shared lock on the file that `BENCHMARK_TURNS` names while it compiles, and an exclusive one while it measures. So the
first measurement starts when all processes have compiled, and the others follow one by one. XLA's autotuning times
kernels during compilation, here while other processes use the GPU too: it may choose kernels that are slightly slower.
Autotuning also takes memory of the process's first GPU, which the process keeps. The processes have different first
GPUs, because the sum of this memory on one GPU would leave too little for the largest step.

Processes that are started at the same time measure in the order of `BENCHMARK_PLACE` (0 if it is not set); those with
the same place measure in any order.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from jaxstack.launch.supervisor import count_gpus

VARIABLE = "BENCHMARK_TURNS"
PLACE = "BENCHMARK_PLACE"
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of processes that share GPUs: memory is taken as it is needed."""


class Turn:
    """Lock of this process: shared from the start, while it compiles; exclusive once `wait` has returned.

    It must be made before JAX starts, because it sets CUDA_VISIBLE_DEVICES (`other_first_gpu`).

    Attributes:
        shared: True if `BENCHMARK_TURNS` is set; otherwise nothing is waited for.
    """

    def __init__(self) -> None:
        self._path = os.environ.get(VARIABLE)
        self._place = int(os.environ.get(PLACE, "0"))
        self.shared = self._path is not None
        self._files: list[int] = []
        if self._path is not None:
            self._files = [_locked(self._path, fcntl.LOCK_SH), _locked(f"{self._path}.{self._place}", fcntl.LOCK_SH)]
            os.environ.update(other_first_gpu(f"{self._path}.processes"))

    def wait(self, tell: Callable[[], object] = lambda: None) -> None:
        """Wait until no other process compiles or measures, and until all with smaller places have ended.

        This process is then the only one until it ends.

        Args:
            tell: is called about every ten seconds, to say that this process waits and does not hang.
        """
        if self._path is not None:
            fcntl.flock(self._files[0], fcntl.LOCK_UN)
            for place in range(self._place):
                file = _opened(f"{self._path}.{place}")
                _lock_alone(file, tell)
                os.close(file)
            _lock_alone(self._files[0], tell)

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Run the block while no other process runs its own: for work before the turn that needs much GPU memory."""
        file = None if self._path is None else _locked(f"{self._path}.memory", fcntl.LOCK_EX)
        try:
            yield
        finally:
            if file is not None:
                os.close(file)

    def end(self) -> None:
        """Give up the turn, as the end of the process does."""
        while self._files:
            os.close(self._files.pop())


def other_first_gpu(path: str) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES rotated, by one more GPU for each process that calls this with the same file.

    Args:
        path: A file with one byte for each process that has called this; created if it is missing.

    Returns:
        The variable, with the visible GPUs rotated; {} on fewer than two GPUs.
    """
    count = count_gpus()
    if count < 2:
        return {}
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, b".")
    first = (os.lseek(file, 0, os.SEEK_CUR) - 1) % count
    os.close(file)
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = known.split(",") if known else [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first:] + names[:first])}


def _locked(path: str, kind: int) -> int:
    """Lock a file, which is created if it is missing, and return its descriptor."""
    file = _opened(path)
    fcntl.flock(file, kind)
    return file


def _opened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _lock_alone(file: int, tell: Callable[[], object]) -> None:
    """Wait until no other process holds a lock on the file, and lock it exclusively."""
    told = time.monotonic()
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        if time.monotonic() > told + 10:
            told = time.monotonic()
            tell()


@contextmanager
def turns() -> Iterator[dict[str, str]]:
    """Yield the environment variables of processes that take turns, with a new lock file if there is none yet."""
    if known := os.environ.get(VARIABLE):
        yield {VARIABLE: known, **SHARED_GPU}
        return
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        yield {VARIABLE: os.path.join(folder, "lock"), **SHARED_GPU}


def place(number: int) -> dict[str, str]:
    """Return `BENCHMARK_PLACE` for a process that this one starts: `number` after this process's own place."""
    return {PLACE: str(int(os.environ.get(PLACE, "0")) + number)}


def run_together(calls: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
    """Run all calls in threads of their own; yield (index, result) of each as soon as it returns."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        futures = {pool.submit(call): index for index, call in enumerate(calls)}
        for future in as_completed(futures):
            yield futures[future], future.result()
