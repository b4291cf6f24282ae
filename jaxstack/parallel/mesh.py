"""Makes the device mesh, which has an axis for every kind of parallelism; unused axes have size 1."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxstack.errors import ConfigError
from jaxstack.parallel.config import AXES, WORKERS, ParallelConfig


def make_mesh(
    parallel: ParallelConfig | None = None,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm] (a variable in jax's stubs)
) -> Mesh:
    """Return a mesh with the axes `pipeline, data, fsdp, expert, context, tensor`; unused axes have size 1.

    With `parallel.workers` above 1 the axis `workers` comes before them.

    Args:
      parallel: degrees; default: all devices on `data`.
      devices: default: all devices of all processes.

    Raises:
      ConfigError: the degrees do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    parallel = (parallel or ParallelConfig(data=-1)).resolve(len(devices))
    several = parallel.workers > 1
    shape = (parallel.workers, *parallel.degrees.values())[not several :]
    axes = (WORKERS, *AXES)[not several :]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def with_all_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Return a mesh over the same devices with all of jaxstack's axes, those that `mesh` lacks of size 1.

    Args:
      mesh: its axes are a subset of `workers, pipeline, data, fsdp, expert, context, tensor`, in any order.

    Raises:
      ConfigError: it has another axis.
    """
    wanted = (WORKERS, *AXES) if WORKERS in mesh.axis_names else AXES
    if unknown := [name for name in mesh.axis_names if name not in wanted]:
        raise ConfigError(
            f"the mesh has an axis {unknown[0]!r}, which is none of {', '.join(AXES)}; rename it, such as to data."
        )
    if tuple(mesh.axis_names) == wanted:
        return mesh
    shape = tuple(mesh.shape.get(name, 1) for name in wanted)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, wanted)
    order = [mesh.axis_names.index(name) for name in wanted if name in mesh.axis_names]
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, wanted, axis_types=(AxisType.Auto,) * len(wanted))


def spread(x: jax.Array) -> jax.Array:
    """Shard matrices x [..., m, n] along n and not along m, so that each device holds whole columns.

    It is split over as many axes of the mesh in context (`jax.set_mesh`) as divide n, without the axes of stages and
    experts, which split other dims. Without a mesh x is returned as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes: list[str] = []
    parts = 1
    # `tensor` first, as in stored weights: its shards stay where they are, and `fsdp` moves to the last dim.
    for name in ("tensor", "context", "fsdp", "data"):
        degree = mesh.shape.get(name, 1)
        if degree > 1 and x.shape[-1] % (parts * degree) == 0:
            axes = [*axes, name]
            parts = parts * degree
    if not axes:
        return x
    free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 2)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*free, None, tuple(axes)))
