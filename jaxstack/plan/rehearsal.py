"""Compiles the train step of a run for GPUs that need not be present (`plan --rehearse`), to check its memory.

`resolve_plan` fills in the parallel degrees and the vocabulary size of a configuration without devices or data.
"""

import functools
import importlib.util
import math
import re
import time
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np
from jax.experimental import topologies

from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.data.config import TokenizerConfig
from jaxstack.data.device_batches import abstract_batch
from jaxstack.data.load_tokenizer import read_tokenizer_file
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.distributed.device_setup import DEVICE_FRACTION
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.observe.what_ran import compiler_memory_estimate
from jaxstack.parallel import make_mesh
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import RunConfig
from pallas_kernels import lowering_platform


def resolve_plan(config: RunConfig, devices: int | None) -> tuple[RunConfig, bool]:
    """Return (configuration with parallel degrees and vocabulary size filled in, True if that size is only assumed).

    Restricts JAX to CPUs in this process: traced functions hold constants, which must not initialize a GPU.

    Args:
      config: configuration of the run.
      devices: number of devices; default: `parallel.simulate_devices`, or the product of the degrees.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit, or the number of devices is not known.
    """
    jax.config.update("jax_platforms", "cpu")
    # `parallel: auto` plans for H200s: this process has none of the run's devices.
    config = with_training_layout(config, _device_count(config) if devices is None else devices, parse_cluster("h200"))
    model, assumed = resolve_vocabulary(config)
    return config.model_copy(update={"model": model}), assumed


def _device_count(config: RunConfig) -> int:
    degrees = config.parallel.degrees
    if config.parallel.simulate_devices is not None:
        return config.parallel.simulate_devices
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if free:
        raise ConfigError(
            f"parallel.{free[0]} is -1 (all remaining devices), but the number of devices is unknown: give --devices N."
        )
    return math.prod(degrees.values())


def resolve_vocabulary(config: RunConfig) -> tuple[ModelConfig, bool]:
    """Return the model with an unset vocabulary size taken from the tokenizer, and True if the tokenizer is untrained.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's, or the tokenizer's file cannot be read.
    """
    model = config.model
    tokenizer = config.data.tokenizer
    if model.vocab_size is not None:
        return model, False
    return resolve_model(model, _tokenizer_size(tokenizer)), tokenizer.name in ("auto", "bpe") and not tokenizer.path


def _tokenizer_size(tokenizer: TokenizerConfig) -> int:
    if tokenizer.name == "byte":
        return ByteTokenizer().vocab_size
    if tokenizer.path:
        return read_tokenizer_file(tokenizer.path, tokenizer.document_start).vocab_size
    return tokenizer.vocab_size


class Rehearsal(TypedDict):
    """Memory per device, kernels and compile time of a train step that was compiled but not run, as plain JSON.

    Attributes:
      kind: kind of GPU.
      arguments_bytes: bytes of state and batch.
      temporary_bytes: bytes of temporaries.
      predicted_bytes: bytes of everything on the device.
      host_bytes: bytes in host memory.
      usable_bytes: bytes of the GPU that XLA may allocate.
      fits: True if `predicted_bytes` is at most `usable_bytes`.
      compile_seconds: time of compilation.
      kernels: `operation: backend` of each chosen kernel.
      jax: version of jax.
    """

    kind: str
    arguments_bytes: int
    temporary_bytes: int
    predicted_bytes: int
    host_bytes: int
    usable_bytes: int
    fits: bool
    compile_seconds: float
    kernels: list[str]
    jax: str


def rehearse(config: RunConfig, devices: int | None = None, kind: str = "h200") -> Rehearsal:
    """Compile the train step for `devices` GPUs that need not be present; return its memory and kernels.

    Args:
      config: configuration of the run.
      devices: number of GPUs; default: `parallel.simulate_devices`, or the product of the degrees.
      kind: kind of GPU, the name of a file in `jaxstack/plan/targets`.

    Raises:
      ConfigError: the CUDA plugin is not installed, or the configuration cannot run.
    """
    if not can_compile():
        raise ConfigError("--rehearse compiles for GPUs and needs JAX's CUDA plugin: pip install 'jaxstack[cuda]'.")
    config, _ = resolve_plan(config, devices)
    mesh = make_mesh(config.parallel, gpu_topology(math.prod(config.parallel.degrees.values()), kind).devices)
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    rows = config.train.global_batch_size
    pairs = config.preference.loss is not None
    answers = config.policy.loss is not None
    packed = config.data.packing and not pairs and not answers
    names = ("tokens", "labels", *(("segment_ids", "positions") if packed else ()))
    shape = (rows, *((config.preference.method.rows,) if pairs else ()), config.train.sequence_length)
    batch: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in names}
    if answers:
        batch |= {name: np.zeros(shape, np.float32) for name in config.policy.arrays}
    if config.preference.cache_reference:
        batch["reference"] = np.zeros(shape[:2], np.float32)
    began = time.perf_counter()
    with lowering_platform("cuda"):
        compiled = trainer.compile(abstract_batch(batch, trainer.rules, rows))
    memory = compiler_memory_estimate(compiled)
    usable = int(DEVICE_FRACTION * device_memory(kind))
    kernels = dict.fromkeys((choice.operation, choice.backend) for choice in trainer.choices)
    return {
        "kind": kind,
        "arguments_bytes": memory["arguments_bytes"],
        "temporary_bytes": memory["temporary_bytes"],
        "predicted_bytes": memory["predicted_bytes"],
        "host_bytes": memory["host_bytes"],
        "usable_bytes": usable,
        "fits": memory["predicted_bytes"] <= usable,
        "compile_seconds": time.perf_counter() - began,
        "kernels": [": ".join(kernel) for kernel in kernels],
        "jax": jax.__version__,
    }


TARGETS = Path(__file__).with_name("targets")
"""Directory with XLA's description of each kind of GPU."""
GPUS_PER_HOST = 8
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def can_compile() -> bool:
    """Return True if GPU programs can be compiled here, by JAX's CUDA plugin, which needs no GPU or driver."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


@functools.cache
def gpu_topology(devices: int, kind: str = "h200", processes: int | None = None) -> topologies.TopologyDescription:
    """Return the topology of `devices` GPUs on hosts of at most eight, as a target of ahead-of-time compilation.

    The result is cached per process, because devices of two topologies never compare equal.

    Args:
      devices: number of GPUs.
      kind: kind of GPU, the name of a file in `TARGETS`.
      processes: number of processes, which divide the GPUs; default: one for each host.
    """
    per_host = math.gcd(devices, GPUS_PER_HOST) if devices > GPUS_PER_HOST else devices
    each = per_host if processes is None else devices // processes
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=(TARGETS / f"{kind}.txtpb").read_text(),
        topology=f"1x{devices // each}x{each}",
    )


def device_memory(kind: str = "h200") -> int:
    """Return the memory of a GPU of this kind, in bytes."""
    found = re.search(r"device_memory_size: (\d+)", (TARGETS / f"{kind}.txtpb").read_text())
    assert found is not None
    return int(found[1])
