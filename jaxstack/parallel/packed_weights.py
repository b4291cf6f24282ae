"""Places packed (quantized) weights on a mesh, sharded as the unquantized weights would be."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import PackedWeight


def place_packed(
    weight: PackedWeight, sharding: jax.sharding.Sharding | None, transposed: bool = False
) -> PackedWeight:
    """Place a packed (quantized) weight on devices, sharded as the unquantized weight would be.

    A dim of an array that the number of shards does not divide is not split.

    Args:
      weight: the packed weight, whose arrays may be NumPy's.
      sharding: the layout of the plain weight; None: one device.
      transposed: True if the plain weight is [out, in], as the table of an embedding.
    """
    if not isinstance(sharding, NamedSharding):
        return dataclasses.replace(weight, arrays={k: jnp.asarray(array) for k, array in weight.arrays.items()})
    dims = (*sharding.spec, *(None,) * (weight.ndim - len(sharding.spec)))
    dims = dims[::-1] if transposed else dims
    split = {"in": dims[0], "out": dims[len(weight.inputs)]}
    placed = {}
    for name, array in weight.arrays.items():
        spec = _array_spec(sharding.mesh, weight.format.dims_of[name], split, array.shape)  # type: ignore[arg-type]
        placed[name] = jax.device_put(array, NamedSharding(sharding.mesh, spec))
    return dataclasses.replace(weight, arrays=placed)


def _array_spec(mesh: Mesh, dims: tuple[str | None, ...], split: Mapping[str, Any], shape: tuple[int, ...]) -> jax.P:
    """Return the PartitionSpec of one array of a packed weight (such as its scales), from that of the weight itself."""
    parts: list[Any] = []
    for dim, size in zip(dims, shape, strict=True):
        axes = None if dim is None else split[dim]
        names = (axes,) if isinstance(axes, str) else axes or ()
        degree = int(np.prod([mesh.shape[name] for name in names]))
        parts.append(axes if size % degree == 0 else None)
    return jax.P(*parts)
