"""`jaxstack.train`, or FAULT_COMMAND, with a fault of rank FAULT_RANK in its first start; `FAULTS` has some of them."""

import ctypes
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.evaluation import Evaluator
from jaxstack.trainer import Trainer

_steps = 0
_train_step = Trainer.train_step
_batches = Trainer.batches
_save = CheckpointManager.save
_stream: Any = Evaluator.run


def _sleep() -> None:
    time.sleep(10_000)


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(10_000)  # a call that does not let the interpreter go


def _run_out_of_memory() -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.")


def _wait_on_a_device() -> None:
    """A program whose only device waits for ever, as one does in a collective that a peer never joins."""
    jax.block_until_ready(jax.jit(lambda: jax.pure_callback(_sleep_with_value, jax.ShapeDtypeStruct((), "int32")))())


def _sleep_with_value() -> int:
    _sleep()
    return 0


FAULTS: dict[str, Callable[[], None]] = {
    "sleep": _sleep,
    "gil": _hold_the_interpreter,
    "memory": _run_out_of_memory,
    "device": _wait_on_a_device,
}
"""FAULT -> what happens in place of step FAULT_STEP; `_install` has those elsewhere."""


def _is_mine() -> bool:
    return os.environ.get("JAX_PROCESS_ID", "0") == os.environ["FAULT_RANK"] and os.environ["JAXSTACK_ATTEMPT"] == "1"


def _faulty_step(self: Trainer, batch: Any) -> Any:
    global _steps
    _steps += 1
    if _is_mine() and _steps == int(os.environ["FAULT_STEP"]):
        FAULTS[os.environ["FAULT"]]()
    return _train_step(self, batch)


def _late_batches(self: Trainer, start: int) -> Any:
    """Each batch 0.1 s late (`lag`), 0.25 s on all ranks at all starts (`slow`), or none from FAULT_STEP (`reader`)."""
    lags = os.environ["FAULT"] == "lag"
    for number, batch in enumerate(_batches(self, start), start + 1):
        if os.environ["FAULT"] == "slow":
            time.sleep(0.25)
        elif _is_mine():
            time.sleep(0.1 if lags else 10_000 * (number == int(os.environ["FAULT_STEP"])))
        yield batch


def _save_on_a_full_disk(self: CheckpointManager, step: int, *arguments: Any, **options: Any) -> None:
    """Until step FAULT_STEP files of this process end after 4 KiB: what the disk of its host still takes."""
    if _is_mine():
        full = step < int(os.environ["FAULT_STEP"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _save(self, step, *arguments, **options)


def _step_on_nan(self: Trainer, batch: Any) -> Any:
    """In FAULT_COUNT steps from FAULT_STEP on the parameters of this process's workers are NaN, and not after them."""
    global _steps
    _steps += 1
    first = int(os.environ["FAULT_STEP"])
    if not _is_mine() or not first <= _steps < first + int(os.environ["FAULT_COUNT"]):
        return _train_step(self, batch)
    good = self.state.params

    def spoilt(x: jax.Array) -> jax.Array:
        parts = [shard.data * float("nan") for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    self.state = self.state._replace(params=jax.tree.map(spoilt, good))
    metrics = _train_step(self, batch)
    self.state = self.state._replace(params=good)
    return metrics


def _faulty_evaluation(self: Evaluator, params: Any, non_params: Any, limit: Any, stop: Any) -> Any:
    def after_batch() -> bool:
        stopped = stop()
        if _is_mine():
            FAULTS["memory" if os.environ["FAULT"] == "evaluation-memory" else "sleep"]()
        return stopped

    return _stream(self, params, non_params, limit, after_batch)


def _install(fault: str) -> None:
    if fault in FAULTS:
        Trainer.train_step = _faulty_step
    elif fault in ("lag", "slow", "reader"):
        Trainer.batches = _late_batches
    elif fault == "disk":
        CheckpointManager.save = _save_on_a_full_disk
    elif fault == "nan":
        Trainer.train_step = _step_on_nan
    elif fault in ("evaluation", "evaluation-memory"):
        Evaluator.run = _faulty_evaluation


_install(os.environ["FAULT"])

if __name__ == "__main__":
    sys.exit(importlib.import_module(os.environ.get("FAULT_COMMAND", "jaxstack.train")).main())
