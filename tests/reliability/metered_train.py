"""`jaxstack.train` whose CPU devices count as GPUs of 100 W, with steps of at least 0.1 s."""

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxstack.observe import energy
from jaxstack.train import main
from jaxstack.trainer import Trainer

WATTS = 100.0
_batches = Trainer.batches


class _Counters:
    def __init__(self, devices: Sequence[Any]):
        self._devices = len(devices)

    def read(self) -> list[float]:
        return [WATTS * time.monotonic()] * self._devices


def _slow_batches(self: Trainer, start: int) -> Any:
    for batch in _batches(self, start):
        time.sleep(0.1)
        yield batch


def _meter() -> None:
    energy.NvmlCounters = _Counters
    energy._count_gpus = len
    energy.EnergyMeter = functools.partial(energy.EnergyMeter, interval=0.2)
    Trainer.batches = _slow_batches


if __name__ == "__main__":  # a test imports this module for its constants
    _meter()
    sys.exit(main())
