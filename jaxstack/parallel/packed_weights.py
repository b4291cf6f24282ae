"""Weights in few bits on a mesh: how their arrays are placed, and products in which each device reads its own part.

The kernels of `packed_matmul` are custom calls, which XLA cannot partition. Their products therefore stand in a
`shard_map`, where a kernel gets the part of the weight that the device stores. As with plain weights, a column-parallel
product leaves its outputs split over `tensor`, and a row-parallel one leaves a term of the result on each device, which
`sum_over_tensor` adds up. All other products are left to XLA.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxstack.errors import ConfigError
from jaxstack.parallel.overlap import AXIS, sum_over_tensor
from jaxstack.parallel.rules import Names, axes_of
from jaxstack.parallel.sharding_context import ShardingContext, current_context, is_sharded
from pallas_kernels import PackedWeight, packed_matmul
from pallas_kernels.weight_only.api import most_kernel_rows


def place_packed(
    weight: PackedWeight, sharding: jax.sharding.Sharding | None, transposed: bool = False
) -> PackedWeight:
    """Place a packed (quantized) weight on devices, sharded as the unquantized weight would be.

    Each device holds a whole part of the matrix: scales are repeated where a part would end within a group or block. A
    dim of an array that the number of shards does not divide is not split.

    Args:
      weight: the packed weight, whose arrays may be NumPy's.
      sharding: the layout of the plain weight; None: one device.
      transposed: True if the plain weight is [out, in], as the table of an embedding.

    Raises:
      ConfigError: a part of an expert's matrix would end within inputs that are stored together.
    """
    if not isinstance(sharding, NamedSharding):
        return dataclasses.replace(weight, arrays={k: jnp.asarray(array) for k, array in weight.arrays.items()})
    mesh = cast(Mesh, sharding.mesh)
    parts = _part_sizes(weight, _split_dims(weight, sharding.spec, transposed), mesh)
    weight = weight.divisible(*parts)
    if weight.stack:  # whose matrices each device multiplies as it stores them
        _check_parts(weight, parts)
    specs = packed_specs(weight, sharding.spec, mesh, transposed)
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in weight.arrays.items()}
    return dataclasses.replace(weight, arrays=placed)


def packed_specs(
    weight: PackedWeight, spec: jax.P, mesh: Mesh | AbstractMesh, transposed: bool = False
) -> dict[str, jax.P]:
    """Return the PartitionSpec of each array of a packed weight, from `spec`, that of the unquantized weight.

    Args:
      weight, transposed: as in `place_packed`.
    """
    stack = len(weight.stack)
    split = _split_dims(weight, spec, transposed)
    found = {}
    for name, array in weight.arrays.items():
        inner = _array_spec(mesh, weight.format.dims_of[name], split, array.shape[stack:])
        found[name] = jax.P(*_padded(spec, stack)[:stack], *inner)
    return found


def packed_product(
    x: jax.Array, weight: PackedWeight, names: Names | None, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Multiply x with a packed weight as `packed_matmul` does, each device with its own part where a kernel may do so.

    Args:
      x: [..., *weight.inputs].
      weight: one matrix, placed as `place_packed` does by the sharding rules of the current context.
      names: logical axes of the plain weight, inputs first; None: it has none.
      out_dtype: dtype of the result; default: that of x. Sums over devices are computed in it.
    """
    context = current_context()
    rows = x.shape[: x.ndim - len(weight.inputs)]
    if context is None or names is None or not _multiplies_parts(context, rows, weight, names):
        return packed_matmul(x, weight, out_dtype=out_dtype)
    rules = context.rules
    inner = context.within(rules.free)
    spec = rules.parameter_spec(names, weight.shape)
    split = _split_dims(weight, spec)
    outputs = weight.outputs
    inputs = weight.inputs
    if split["out"]:
        outputs = outputs[0] // rules.mesh.shape[AXIS], *outputs[1:]
    if split["in"]:
        inputs = inputs[0] // rules.mesh.shape[AXIS], *inputs[1:]

    def local(x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        part = PackedWeight(arrays, weight.format, inputs, outputs)
        with inner.entered():
            y = packed_matmul(x, part, out_dtype=out_dtype)
            return sum_over_tensor(y.reshape(-1, y.shape[-1])).reshape(y.shape) if split["in"] else y

    by_row = _row_spec(context, rows)
    return jax.shard_map(
        local,
        mesh=rules.mesh,
        in_specs=(PartitionSpec(*by_row, split["in"]), packed_specs(weight, spec, rules.mesh)),
        out_specs=PartitionSpec(*by_row, split["out"]),
        axis_names=set(rules.free),  # all of them: XLA cannot partition a kernel over an automatic axis
        check_vma=False,
    )(x, weight.arrays)


def _multiplies_parts(context: ShardingContext, rows: tuple[int, ...], weight: PackedWeight, names: Names) -> bool:
    """Return True if each device should multiply its own rows with the part of the weight that it stores."""
    rules = context.rules
    if not is_sharded() or rules.manual or axes_of(rules.spec(("residual_length",))[0]):
        return False
    spec = rules.parameter_spec(names, weight.shape)
    split = _split_dims(weight, spec)
    axes = {axis for part in spec for axis in axes_of(part)}
    if axes - {AXIS} or axes != {axis for part in split.values() for axis in axes_of(part)}:
        return False
    whole = math.prod(rows)
    own = whole // rules.degree([axis for part in _row_spec(context, rows) for axis in axes_of(part)])
    # Formats that round the inputs of many rows do so by the rows of the whole product, on every mesh.
    if (whole if weight.format.weight_only != weight.format else own) > most_kernel_rows(weight):
        return False
    if any(x.shape[0] > 1 for name, x in weight.arrays.items() if weight.format.dims_of[name][0] is None):
        return False  # several lookup tables, each of which serves a range of outputs
    parts = _part_sizes(weight, split, rules.mesh)
    return all(part % unit == 0 for part, unit in zip(parts, weight.format.unit(weight.arrays), strict=True))


def _row_spec(context: ShardingContext, rows: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the mesh axes of each dim of the rows of a product, of which the first are batch and length."""
    known = context.rules.spec(("batch", "length")[: len(rows)], rows[:2])
    return _padded(known, len(rows))


def _check_parts(weight: PackedWeight, parts: tuple[int, int]) -> None:
    """Check that the parts of a matrix on the devices end where it can be cut.

    Raises:
      ConfigError: they do not.
    """
    names = zip(("outputs", "inputs"), parts, weight.format.unit(weight.arrays), strict=True)
    for name, part, unit in names:
        if part % unit:
            raise ConfigError(
                f"each device's part of the {name} of an expert ({part}) must be a multiple of {unit}, as the format "
                f"{weight.format.name} stores {unit} together; split the experts less (parallel.fsdp, parallel.tensor)."
            )


def _split_dims(weight: PackedWeight, spec: jax.P, transposed: bool = False) -> dict[str, Any]:
    """Return the mesh axes over which the matrix is split along its dims `out` and `in`."""
    stack = len(weight.stack)
    dims = _padded(spec, weight.ndim)
    dims = dims[::-1] if transposed else dims
    return {"out": dims[stack + len(weight.inputs)], "in": dims[stack]}


def _part_sizes(weight: PackedWeight, split: Mapping[str, Any], mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Return the numbers of outputs and of inputs that each device stores; 0 for a dim that is not split."""
    sizes = {"out": math.prod(weight.outputs), "in": math.prod(weight.inputs)}
    degrees = {dim: _degree(mesh, axes) for dim, axes in split.items()}
    outputs, inputs = (sizes[dim] // degrees[dim] if degrees[dim] > 1 else 0 for dim in ("out", "in"))
    return outputs, inputs


def _padded(spec: jax.P, ndim: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (ndim - len(spec)))


def _degree(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Return the number of devices along the mesh axes of a dim."""
    return math.prod(mesh.shape[name] for name in axes_of(axes))


def _array_spec(
    mesh: Mesh | AbstractMesh, dims: tuple[str | None, ...], split: Mapping[str, Any], shape: tuple[int, ...]
) -> jax.P:
    """Return the PartitionSpec of one array of a packed weight (such as its scales), from that of the weight itself."""
    parts: list[Any] = []
    for dim, size in zip(dims, shape, strict=True):
        axes = None if dim is None else split[dim]
        parts.append(axes if size % _degree(mesh, axes) == 0 else None)
    return jax.P(*parts)
