"""The one device mesh, with all axes always present."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxstack.parallel.config import AXES, ParallelConfig


def make_mesh(parallel: ParallelConfig | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `pipeline, data, fsdp, expert, context, tensor`, those not used having size 1.

    Args:
      parallel: degrees; default: all devices on `data`.
      devices: default: all devices of all processes.

    Raises:
      ConfigError: the degrees do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    parallel = (parallel or ParallelConfig(data=-1)).resolve(len(devices))
    shape = tuple(parallel.degrees.values())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
