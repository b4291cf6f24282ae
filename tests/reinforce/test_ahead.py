"""Rollouts that are sampled ahead of training: which weights sample which, and the turns of two threads."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxstack.reinforce.ahead import Ahead, SharedDevices


class Run:
    """Trains on rollouts that are just (number, steps of the weights), with waits of random length."""

    def __init__(self, updates: int, stale_steps: int, seed: int = 0):
        self.updates = updates
        self.done = 0
        self.random = random.Random(seed)
        self.ahead = Ahead[tuple[int, int]](
            self.sample, lambda: self.done, SharedDevices(), updates=updates, stale_steps=stale_steps
        )

    def sample(self, number: int, version: int, weights: int) -> tuple[int, int]:
        assert weights == version
        time.sleep(self.random.random() * 0.005)
        return number, version

    def train(self, start: int, steps: int, known: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list]:
        """Return the rollouts of the steps, and those that wait after them."""
        self.ahead.start(start, known)
        self.done = start
        taken = []
        for step in range(start, start + steps):
            self.ahead.advance(step)
            if step % self.updates == 0:
                taken.append(self.ahead.take())
            time.sleep(self.random.random() * 0.005)
            self.done = step + 1
        waiting = self.ahead.waiting()
        self.ahead.close()
        return taken, waiting


@pytest.mark.parametrize(("updates", "stale_steps"), [(1, 0), (1, 1), (1, 3), (2, 1), (2, 2), (2, 5)])
def test_versions_follow_from_the_steps(updates, stale_steps):
    wanted = [(number, max(0, number * updates - stale_steps)) for number in range(6)]
    whole, waiting = Run(updates, stale_steps).train(0, 6 * updates, [])
    assert whole == wanted
    assert all(6 * updates - stale_steps <= version < 6 * updates for _, version in waiting)
    first, known = Run(updates, stale_steps, 1).train(0, 2 * updates, [])
    rest, end = Run(updates, stale_steps, 2).train(2 * updates, 4 * updates, known)
    assert [*first, *rest] == wanted and end == waiting, "a resumed run has the rollouts of one that was not stopped"


def test_a_failure_of_the_sampler_reaches_the_trainer():
    def fail(number: int, version: int, weights: object) -> int:
        raise ValueError(f"rollout {number}")

    ahead = Ahead[int](fail, lambda: None, SharedDevices(), updates=1, stale_steps=1)
    ahead.start(0)
    ahead.advance(0)
    with pytest.raises(ValueError, match="rollout 0"):
        ahead.take()
    ahead.close()


def test_devices_are_used_by_one_thread_at_a_time():
    devices = SharedDevices()
    stop = threading.Event()
    used = []

    def borrow() -> None:
        while not stop.is_set():
            with devices.borrow():
                used.append("borrower")
                time.sleep(1e-4)
                used.append("borrower")

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(borrow)
        for _ in range(20):
            with devices.lend():
                time.sleep(5e-4)
            used.append("owner")
            time.sleep(2e-4)
            used.append("owner")
        stop.set()
        with devices.lend():
            thread.result()
    assert used.count("owner") == 40 and used.count("borrower") > 40
    assert used[::2] == used[1::2], "neither begins while the other is at it"
