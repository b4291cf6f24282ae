"""`jaxstack.train` with a fault of one rank: FAULT=sleep|gil (at step FAULT_STEP of the first start) or lag."""

import ctypes
import os
import sys
import time
from typing import Any

from jaxstack.train import main
from jaxstack.trainer import Trainer

_steps = 0
_train_step = Trainer.train_step
_batches = Trainer.batches


def _faulty_step(self: Trainer, batch: Any) -> Any:
    global _steps
    _steps += 1
    mine = os.environ.get("JAX_PROCESS_ID", "0") == os.environ["FAULT_RANK"]
    kind = os.environ["FAULT"]
    if mine and kind != "lag" and _steps == int(os.environ["FAULT_STEP"]) and os.environ["JAXSTACK_ATTEMPT"] == "1":
        if kind == "gil":
            ctypes.PyDLL(None).sleep(10_000)  # a call that does not let the interpreter go
        time.sleep(10_000)
    return _train_step(self, batch)


def _late_batches(self: Trainer, start: int) -> Any:
    for batch in _batches(self, start):
        if os.environ.get("JAX_PROCESS_ID", "0") == os.environ["FAULT_RANK"]:
            time.sleep(0.1)
        yield batch


Trainer.train_step = _faulty_step
if os.environ["FAULT"] == "lag":
    Trainer.batches = _late_batches

if __name__ == "__main__":
    sys.exit(main())
