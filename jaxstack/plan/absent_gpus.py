"""GPUs that are not there, for programs that are compiled ahead of time."""

import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

from jax.experimental import topologies

TARGETS = Path(__file__).with_name("targets")
"""A file for each kind of GPU, as XLA describes it."""
GPUS_A_HOST = 8
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def can_compile() -> bool:
    """Whether JAX's CUDA plugin is installed; it needs no GPU and no driver."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


@functools.cache
def absent_gpus(devices: int, kind: str = "h200") -> Any:
    """The topology of so many GPUs on hosts of at most eight; made once a process, as devices of two are never equal.

    Args:
      kind: a file of `TARGETS`.
    """
    each = math.gcd(devices, GPUS_A_HOST) if devices > GPUS_A_HOST else devices
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=(TARGETS / f"{kind}.txtpb").read_text(),
        topology=f"1x{devices // each}x{each}",
    )


def device_memory(kind: str = "h200") -> int:
    """Bytes of such a GPU."""
    found = re.search(r"device_memory_size: (\d+)", (TARGETS / f"{kind}.txtpb").read_text())
    assert found is not None
    return int(found[1])
