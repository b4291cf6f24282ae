"""Copies to devices: no more bytes on their way than allowed, the oldest waited for first."""

import jax
import numpy as np

from jaxstack.parallel.transfers import Transfers


class _OnItsWay:
    """Stands for an array that arrives when it is waited for; CPUs copy at once."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.arrived = False

    def block_until_ready(self):
        self.arrived = True


def test_the_oldest_are_waited_for_until_the_others_are_few_enough():
    transfers = Transfers(100)
    arrays = [_OnItsWay(nbytes) for nbytes in (40, 60, 30, 30, 30)]
    arrived = []
    for array in arrays:
        assert transfers.add(array) is array
        arrived.append([other.arrived for other in arrays].count(True))
        assert sum(other.nbytes for other in arrays[: len(arrived)] if not other.arrived) <= 100
    assert arrived == [0, 0, 1, 2, 2]
    assert arrays[0].arrived and arrays[1].arrived


def test_an_array_above_the_bound_is_waited_for():
    transfers = Transfers(100)
    large = _OnItsWay(101)
    transfers.add(large)
    assert large.arrived


def test_arrays_come_back_whole():
    transfers = Transfers(64)
    values = np.arange(32, dtype=np.float32)
    for part in range(4):
        np.testing.assert_array_equal(transfers.add(jax.device_put(values[part:])), values[part:])
