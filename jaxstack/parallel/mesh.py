"""The one device mesh, with all axes always present."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

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


def spread(x: jax.Array) -> jax.Array:
    """x [..., n] with n in parts over the devices, and the dim before it whole, for work on each matrix as a whole.

    Over as many axes of the mesh in context (`jax.set_mesh`) as divide n; those of stages and experts, to which other
    dims belong, are left out. Without a mesh x as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes: list[str] = []
    parts = 1
    # As weights are stored: what `tensor` splits stays where it is, and `fsdp` changes from one dim to the other.
    for name in ("tensor", "context", "fsdp", "data"):
        degree = mesh.shape.get(name, 1)
        if degree > 1 and x.shape[-1] % (parts * degree) == 0:
            axes, parts = [*axes, name], parts * degree
    if not axes:
        return x
    free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 2)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*free, None, tuple(axes)))
