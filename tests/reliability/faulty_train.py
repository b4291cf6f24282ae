"""`jaxstack.train` with a fault of one rank at one step of its first start: FAULT=sleep|gil, FAULT_RANK, FAULT_STEP."""

import ctypes
import os
import sys
import time
from typing import Any

from jaxstack.train import main
from jaxstack.trainer import Trainer

_steps = 0
_train_step = Trainer.train_step


def _faulty_step(self: Trainer, batch: Any) -> Any:
    global _steps
    _steps += 1
    mine = os.environ.get("JAX_PROCESS_ID", "0") == os.environ["FAULT_RANK"]
    kind = os.environ["FAULT"]
    if kind == "lag" and mine:
        time.sleep(0.1)
    elif mine and _steps == int(os.environ["FAULT_STEP"]) and os.environ["JAXSTACK_ATTEMPT"] == "1":
        if kind == "gil":
            ctypes.PyDLL(None).sleep(10_000)  # a call that does not let the interpreter go
        time.sleep(10_000)
    return _train_step(self, batch)


Trainer.train_step = _faulty_step

if __name__ == "__main__":
    sys.exit(main())
