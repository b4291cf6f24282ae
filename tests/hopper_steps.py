"""Compiles the training steps of whole runs ahead of time for NVIDIA H200s, without a GPU."""

import math
from typing import Any

import numpy as np

from jaxstack.data.device_batches import abstract_batch
from jaxstack.parallel import make_mesh
from jaxstack.run.build import make_trainer
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer
from pallas_kernels import lowering_platform
from tests.compilation import fully_optimized
from tests.hopper import hopper_topology


@fully_optimized()
def compile_step(config: RunConfig, processes: int | None = None) -> tuple[Trainer, Any]:
    """A run's trainer on as many H200s as its layout has, of one process or several, and its compiled train step."""
    devices = config.parallel.workers * math.prod(config.parallel.degrees.values())
    mesh = make_mesh(config.parallel, hopper_topology(devices, processes).devices)
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    rows = config.train.global_batch_size
    length = config.train.sequence_length
    batch = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "labels", "segment_ids")}
    with lowering_platform("cuda", compute_capability=(9, 0)):
        return trainer, trainer.compile(abstract_batch(batch, trainer.rules, rows))
