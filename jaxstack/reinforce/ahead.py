"""Sampling ahead of training: a thread samples rollouts with older weights while the trainer takes steps."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedDevices:
    """Lets two threads of a process use its devices in turn.

    The trainer's thread owns the devices, and lends them while it waits; the sampler's thread borrows them for one
    program at a time. So the programs of both start in one order on all devices: programs with collectives that start
    in different orders on different devices would wait for each other forever. Programs on one device need no turn.
    """

    def __init__(self) -> None:
        self._lent = threading.Event()
        self._in_use = threading.Lock()

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Let other threads borrow the devices in this `with` block, whose thread starts no programs itself."""
        self._lent.set()
        try:
            yield
        finally:
            self._lent.clear()
            with self._in_use:  # until the program that is being started has started
                pass

    @contextlib.contextmanager
    def borrow(self) -> Iterator[None]:
        """Wait until the devices are lent, and keep them for this `with` block."""
        while True:
            self._lent.wait()
            with self._in_use:
                if self._lent.is_set():
                    yield
                    return


class Ahead(Generic[T]):
    """Rollouts that are sampled a number of train steps ahead of the steps that train on them.

    A rollout is sampled with the weights that the model has `stale_steps` steps before it is trained on, or at the
    start of the run. So which weights sample it follows from the steps, never from the time that something takes.

    Args:
      sample: called in order, in a thread if `stale_steps` is positive, with the number of a rollout, the number of
        steps after which the model had the weights, and the weights; returns the rollout.
      weights: returns a copy of the model's present weights for the sampler.
      devices: are lent while this object waits.
      updates: number of train steps with each rollout.
      stale_steps: number of steps.
    """

    def __init__(
        self,
        sample: Callable[[int, int, Any], T],
        weights: Callable[[], Any],
        devices: SharedDevices,
        *,
        updates: int,
        stale_steps: int,
    ):
        self._sample = sample
        self._weights = weights
        self._devices = devices
        self._updates = updates
        self._stale_steps = stale_steps
        self._thread: ThreadPoolExecutor | None = None
        self._next = 0
        self._queue = deque[Future[T]]()

    def start(self, step: int, known: Iterable[T] = ()) -> None:
        """Begin at `step`, with the rollouts from this step on that are known already."""
        self._thread = ThreadPoolExecutor(1, "jaxstack sampler") if self._stale_steps else None
        self._queue = deque(map(_done, known))
        self._next = step // self._updates + len(self._queue)

    def advance(self, step: int) -> None:
        """Begin the rollouts that the weights after `step` steps sample. To be called for each step."""
        weights = None
        while self._next * self._updates - self._stale_steps <= step:
            weights = self._weights() if weights is None else weights
            self._queue.append(self._begin(self._next, step, weights))
            self._next += 1

    def take(self) -> T:
        """Wait for the next rollout in order, and return it."""
        with self._devices.lend():
            return self._queue.popleft().result()

    def waiting(self) -> list[T]:
        """Wait until all rollouts that have begun are complete, and return those that were not taken."""
        with self._devices.lend():
            return [rollout.result() for rollout in self._queue]

    def close(self) -> None:
        """End the thread once it has completed the rollout that it samples now, and forget all rollouts."""
        if self._thread is not None:
            with self._devices.lend():
                self._thread.shutdown(cancel_futures=True)
        self._queue.clear()

    def _begin(self, number: int, step: int, weights: Any) -> "Future[T]":
        if self._thread is not None:
            return self._thread.submit(self._sample, number, step, weights)
        with self._devices.lend():
            return _done(self._sample(number, step, weights))


def _done(value: T) -> "Future[T]":
    future = Future[T]()
    future.set_result(value)
    return future
