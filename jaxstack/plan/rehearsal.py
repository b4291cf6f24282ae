"""The real train step compiled for GPUs that are not there: its memory on each, and its kernels."""

import math
import time
from typing import Any

import jax
import numpy as np

from jaxstack.data.device import abstract_batch
from jaxstack.distributed.devices import DEVICE_FRACTION
from jaxstack.errors import ConfigError
from jaxstack.observe.what_ran import predicted_memory
from jaxstack.parallel import make_mesh
from jaxstack.plan.absent_gpus import absent_gpus, can_compile, device_memory
from jaxstack.plan.describe import resolve_plan
from jaxstack.run.build import make_trainer
from jaxstack.run_config import RunConfig
from pallas_kernels import lowering_platform


def rehearse(config: RunConfig, devices: int | None = None, kind: str = "h200") -> dict[str, Any]:
    """What `trainer.compile` finds for this configuration on `devices` GPUs, as plain JSON.

    Args:
      devices: as of `describe_plan`.
      kind: a file of `jaxstack/plan/targets`.

    Raises:
      ConfigError: the CUDA plugin is not installed, or the configuration cannot run.
    """
    if not can_compile():
        raise ConfigError("--rehearse compiles for GPUs and needs JAX's CUDA plugin: pip install 'jaxstack[cuda]'.")
    config, _ = resolve_plan(config, devices)
    mesh = make_mesh(config.parallel, absent_gpus(math.prod(config.parallel.degrees.values()), kind).devices)
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    rows = config.train.global_batch_size
    names = ("tokens", "labels", *(("segment_ids", "positions") if config.data.packing else ()))
    batch = {name: np.zeros((rows, config.train.sequence_length), np.int32) for name in names}
    began = time.perf_counter()
    with lowering_platform("cuda"):
        compiled = trainer.compile(abstract_batch(batch, trainer.rules, rows))
    found, usable = predicted_memory(compiled), int(DEVICE_FRACTION * device_memory(kind))
    kernels = dict.fromkeys((choice.operation, choice.backend) for choice in trainer.choices)
    return {
        "kind": kind,
        **found,
        "usable_bytes": usable,
        "fits": found["predicted_bytes"] <= usable,
        "compile_seconds": time.perf_counter() - began,
        "kernels": [": ".join(kernel) for kernel in kernels],
        "jax": jax.__version__,
    }
