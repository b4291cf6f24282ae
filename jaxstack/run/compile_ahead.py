"""Compiles the train step of a run with one node fewer beside its steps, so that a restart after a loss need not.

The program is compiled for the devices of the first nodes of the present start: its key in JAX's compilation cache is
that of a start with only these nodes, because it has the same devices' indices, options and HLO.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxstack.data.batch_source import BatchSource
from jaxstack.data.device_batches import BatchShardings
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError
from jaxstack.run.build import make_trainer
from jaxstack.run.setting import after_loss
from jaxstack.run_config import RunConfig
from jaxstack.step import StepSettings

_LEAST_PRIORITY = 19


class CompileAhead:
    """Compiles the train step of the next smaller layout in a thread of low priority.

    Args:
      asked: configuration of the run as given, whose layout is for all nodes; its vocabulary must be set.
      data: batches of the run.
      say: reports a message.
    """

    def __init__(self, asked: RunConfig, data: BatchSource, say: Callable[[str], None]):
        self._asked = asked
        self._data = data
        self._say = say
        self._thread: threading.Thread | None = None

    def start(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Begin to compile for global batches of these shapes, if the run may go on with fewer nodes.

        The first process writes the cache. On GPUs all compile, as XLA divides the timing of kernels between them.
        """
        try:
            found = after_loss(self._asked)
        except ConfigError as error:
            return self._say(f"nothing is compiled for a lost node: {error}")
        if found is None:
            return
        if jax.process_index() and jax.local_devices()[0].platform == "cpu":
            return
        self._thread = threading.Thread(target=self._compile, args=(*found, batch), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the process end without what is still compiled."""
        if self._thread is not None and self._thread.is_alive():
            coordination.abandon_thread()

    def _compile(
        self, config: RunConfig, devices: Sequence[Any], change: str, batch: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        began = time.monotonic()
        try:
            trainer = make_trainer(config, self._data, devices, base=config.packed_base())
            trainer.set_step(StepSettings(config.resilience.spike_threshold, config.observe.noise_scale))
            rows = config.train.global_batch_size
            shardings = BatchShardings(trainer.rules, rows)
            shapes = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings.of(name, x.ndim))
                for name, x in batch.items()
            }
            trainer.program.compile(trainer.program.lower(shapes))
        except Exception as error:  # the run does not depend on it
            return self._say(f"warning: the step for a lost node could not be compiled: {error}")
        self._say(f"compiled the step for a lost node ({change}) in {time.monotonic() - began:.1f} s")
