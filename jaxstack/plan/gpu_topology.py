"""Topologies of GPUs that need not be present, as targets of ahead-of-time compilation."""

import functools
import importlib.util
import math
import re
from pathlib import Path

from jax.experimental import topologies

TARGETS = Path(__file__).with_name("targets")
"""Directory with XLA's description of each kind of GPU."""
GPUS_PER_HOST = 8
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def can_compile() -> bool:
    """Return True if GPU programs can be compiled here, by JAX's CUDA plugin, which needs no GPU or driver."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


@functools.cache
def gpu_topology(devices: int, kind: str = "h200") -> topologies.TopologyDescription:
    """Return the topology of `devices` GPUs on hosts of at most eight, as a target of ahead-of-time compilation.

    The result is cached per process, because devices of two topologies never compare equal.

    Args:
      devices: number of GPUs.
      kind: kind of GPU, the name of a file in `TARGETS`.
    """
    per_host = math.gcd(devices, GPUS_PER_HOST) if devices > GPUS_PER_HOST else devices
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=(TARGETS / f"{kind}.txtpb").read_text(),
        topology=f"1x{devices // per_host}x{per_host}",
    )


def device_memory(kind: str = "h200") -> int:
    """Return the memory of a GPU of this kind, in bytes."""
    found = re.search(r"device_memory_size: (\d+)", (TARGETS / f"{kind}.txtpb").read_text())
    assert found is not None
    return int(found[1])
