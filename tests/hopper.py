"""Compiles ahead of time for NVIDIA H200s, without a GPU: what XLA makes of a program can be tested.

Needs the CUDA plugin of JAX (a plain wheel, no driver); where it is not installed the test is skipped.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.plan.rehearsal import can_compile, gpu_topology
from tests.compilation import fully_optimized


def hopper_topology(devices: int = 4, processes: int | None = None) -> Any:
    """One host with that many H200s, of one process or several; made once, as devices of two never compare equal."""
    if not can_compile():
        pytest.skip("compiling for H200 needs the CUDA plugin of JAX: pip install 'jaxstack[cuda]'")
    return gpu_topology(devices, processes=processes)


def hopper_mesh(axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of absent H200s, axes name -> size in order; by default one device on the axis `data`."""
    axes = axes or {"data": 1}
    topology = hopper_topology(math.prod(axes.values()))
    return topologies.make_mesh(topo=topology, mesh_shape=tuple(axes.values()), axis_names=tuple(axes))


def hopper_array(
    shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec | None = None
) -> jax.ShapeDtypeStruct:
    """An abstract array on such a mesh, replicated without a `spec`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))


def compile_for_hopper(
    function: Any, *arguments: Any, mesh: Mesh | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles `function` (jitted or not) for H200s; `.as_text()` of the result is the scheduled module.

    Arguments are trees of abstract arrays; those without a sharding are replicated over `mesh` (default: one
    device). `options` are XLA's compiler options, e.g. `{"xla_gpu_enable_triton_gemm": False}`.
    """
    mesh = mesh or hopper_mesh()

    def place(array: Any) -> jax.ShapeDtypeStruct:
        if isinstance(array, jax.ShapeDtypeStruct) and array.sharding is not None:
            return array
        return hopper_array(array.shape, array.dtype, mesh)

    jitted = function if hasattr(function, "lower") else jax.jit(function)
    lowered = jitted.lower(*jax.tree.map(place, arguments))
    with fully_optimized():
        return lowered.compile(compiler_options=options)
