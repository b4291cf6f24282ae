"""The device mesh: makes it, and finds the devices that hold each part of an array.

The mesh has an axis for every kind of parallelism; unused axes have size 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
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


Degrees = Mapping[str, int]
"""Axis -> degree, slowest first. A device's number is its position in this order."""


def device_grid(mesh: Degrees, mesh_axes: Sequence[Sequence[str]]) -> np.ndarray:
    """Return an array with one item per shard of a sharded array: the numbers of the devices that hold the shard.

    Args:
      mesh: axis -> degree.
      mesh_axes: for each dim of the array, the axes that shard it.

    Returns:
      An object array with a dim for each dim of the array, whose size is the number of parts along it. Each element is
      the tuple of the numbers of the devices that hold this part (replicas of it).
    """
    sizes = [int(np.prod([mesh[axis] for axis in axes], dtype=int)) for axes in mesh_axes]
    parts: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(np.ndindex(*mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        part = tuple(_index([(at[axis], mesh[axis]) for axis in axes]) for axes in mesh_axes)
        parts.setdefault(part, []).append(number)
    grid = np.empty(sizes, dtype=object)
    for part, devices in parts.items():
        grid[part] = tuple(devices)
    return grid


def _index(places: Sequence[tuple[int, int]]) -> int:
    """Return the flat row-major index for (index, size) pairs, one for each dim."""
    number = 0
    for index, size in places:
        number = number * size + index
    return number


def split_panels(row: Mapping[str, Any], mesh: Degrees) -> np.ndarray:
    """Return the device numbers of each shard of an array, arranged as [panels, rows, columns] of a picture.

    `row` is one of those of `describe_shardings`.

    The last two sharded dims become rows and columns, those before them panels.
    """
    grid = device_grid(mesh, row["mesh_axes"])
    split = [size for size in grid.shape if size > 1]
    down, across = ([1, 1] + split)[-2:]
    return grid.reshape(-1, down, across)


def panels_name(row: Mapping[str, Any]) -> str:
    """Return the label of a picture's panels: the dims (with mesh axes) that are split over separate panels."""
    dims = zip(row["logical_axes"], row["mesh_axes"], strict=True)
    split = [f"{name or 'dim'} / {' x '.join(axes)}" for name, axes in dims if axes]
    return ", ".join(split[:-2])


def replicating_axes(row: Mapping[str, Any], mesh: Degrees) -> list[str]:
    """Return the mesh axes along which an array is replicated, because they shard none of its dims.

    Devices along them hold replicas.
    """
    used = {axis for axes in row["mesh_axes"] for axis in axes}
    return [axis for axis in mesh if axis not in used]


def describe_dims(row: Mapping[str, Any]) -> str:
    """Describe the dims of an array with the mesh axes that shard them: `embed / fsdp, mlp / tensor`."""
    names = (name or str(size) for name, size in zip(row["logical_axes"], row["shape"], strict=True))
    parts = zip(names, row["mesh_axes"], strict=True)
    return ", ".join(f"{name} / {' x '.join(axes)}" if axes else name for name, axes in parts) or "a number"


def distinct_layouts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Return the largest array of each distinct sharding, with the number of other arrays that have it."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(str([axes for axes in row["mesh_axes"] if axes]), []).append(row)
    largest = [max(same, key=lambda row: int(np.prod(row["shape"]))) for same in found.values()]
    return [(row, sum(r["arrays"] for r in same) - 1) for row, same in zip(largest, found.values(), strict=True)]


def format_number_ranges(numbers: Sequence[int]) -> str:
    """Format numbers as text, with ranges for consecutive ones: `0-3, 8, 12, 13`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
