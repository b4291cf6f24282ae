"""Sharding types of a tensor along each mesh axis, as in OneFlow's SBP: split, broadcast, or partial sums.

Yuan et al. 2021, arXiv:2110.15032. Along an axis of p devices a tensor is `split(dim)`, in p parts of that dim;
`broadcast`, whole on every device; or `partial`: every device holds a term of the same shape, and the tensor is their
sum. A matmul that contracts a split dim returns a partial tensor. Partial tensors can be added without communication,
and `redistribute` sums them over devices once, where the sum is needed (`sbp_einsum` refuses them). In JAX, types are
part of the type of an array on a mesh of explicit axes, where `partial` is `PartitionSpec(unreduced=...)`.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxstack.parallel.rules import axes_of


@dataclass(frozen=True)
class Split:
    """Sharding type of a tensor that is cut along `dim` into equal parts, one per device of a mesh axis."""

    dim: int


@dataclass(frozen=True)
class Broadcast:
    """Sharding type of a tensor that every device of a mesh axis holds as a whole."""


@dataclass(frozen=True)
class Partial:
    """Sharding type of a tensor that is the sum of full-shape terms, one on each device of a mesh axis."""


ShardingType = Split | Broadcast | Partial
"""Type of a tensor along one mesh axis."""
ShardingTypes = Mapping[str, ShardingType]
"""Mesh axis -> type of a tensor along it; the tensor is `broadcast` along axes that are left out."""

broadcast = Broadcast()
"""The type of a tensor that is whole on every device of an axis."""
partial = Partial()
"""The type of a tensor that is the sum of terms on the devices of an axis."""


def split(dim: int) -> Split:
    """Return the sharding type of a tensor that is divided along `dim` over the devices of a mesh axis."""
    return Split(dim)


def explicit_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh with all axes in JAX's explicit sharding mode, where an array's type includes its sharding.

    Args:
      mesh: as `make_mesh` returns, whose axes XLA partitions by itself.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def sbp_sharding(mesh: Mesh, types: ShardingTypes, ndim: int) -> NamedSharding:
    """Return the NamedSharding of a tensor with these sharding types, on a mesh of explicit axes.

    A dim that is split over several axes is divided by the first axis of the mesh first.

    Args:
      mesh: as `explicit_mesh` returns.
      types: mesh axis -> type.
      ndim: rank of the tensor.

    Raises:
      ValueError: an axis that the mesh lacks or XLA partitions by itself, or a dim that the tensor lacks.
    """
    if unknown := [axis for axis in types if axis not in mesh.axis_names]:
        raise ValueError(f"unknown mesh axes {unknown}; the mesh has {', '.join(mesh.axis_names)}.")
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        raise ValueError(f"sharding types need a mesh of explicit axes, found {mesh.axis_types}; use explicit_mesh().")
    parts: list[tuple[str, ...]] = [()] * ndim
    for axis in mesh.axis_names:
        kind = types.get(axis, broadcast)
        if isinstance(kind, Split):
            if not -ndim <= kind.dim < ndim:
                raise ValueError(f"split({kind.dim}) along {axis!r} needs such a dim, but the tensor has rank {ndim}.")
            parts[kind.dim] = (*parts[kind.dim], axis)
    summed = frozenset(axis for axis, kind in types.items() if isinstance(kind, Partial))
    spec = [names[0] if len(names) == 1 else names or None for names in parts]
    return NamedSharding(mesh, PartitionSpec(*spec, unreduced=summed))


def sbp_of(x: Shaped[Array, "..."]) -> dict[str, ShardingType]:
    """Return the sharding type of an array along each axis of its mesh, also while a function is traced.

    Raises:
      ValueError: the array is on no mesh of explicit axes.
    """
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or any(kind != AxisType.Explicit for kind in sharding.mesh.axis_types):
        raise ValueError(
            "the array is on no mesh of explicit axes; place it by redistribute(x, types, mesh) before it enters a "
            "traced function, or create it under jax.set_mesh(mesh)."
        )
    found: dict[str, ShardingType] = dict.fromkeys(sharding.mesh.axis_names, broadcast)
    found |= {axis: Split(dim) for dim, part in enumerate(sharding.spec.partitions) for axis in axes_of(part)}
    return found | dict.fromkeys(sharding.spec.unreduced, partial)


def redistribute(x: Shaped[Array, "..."], types: ShardingTypes, mesh: Mesh | None = None) -> Shaped[Array, "..."]:
    """Return a tensor with its sharding types changed to `types`, by the communication that the change needs.

    For a tensor of T bytes over p devices, all devices together send (p - 1) / p T for split to another split,
    (p - 1) T for split to broadcast and partial to split, 2 (p - 1) T for partial to broadcast, otherwise nothing.

    Args:
      x: an array on a mesh of explicit axes; outside of traced functions any array, together with `mesh`.
      types: mesh axis -> type; the result is `broadcast` along axes that are left out.
      mesh: as `explicit_mesh` returns; default: the mesh of `x`.

    Raises:
      ValueError: `x` is on no such mesh, or the types do not fit it.
    """
    if mesh is None or isinstance(x, Tracer):
        sbp_of(x)  # refuses arrays that are on no such mesh
        return jax.reshard(x, sbp_sharding(mesh or jax.typeof(x).sharding.mesh, types, x.ndim))
    placed = {axis: kind for axis, kind in types.items() if not isinstance(kind, Partial)}
    x = jax.device_put(x, sbp_sharding(mesh, placed, x.ndim))
    return jax.reshard(x, sbp_sharding(mesh, types, x.ndim))


def sbp_einsum(subscripts: str, *operands: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Compute `jnp.einsum` on local shards without communication, and infer the result's sharding types.

    Along a mesh axis that splits a letter of the result, the result is split along that letter; if the axis splits a
    letter that is summed, the result is partial. Every operand that has the letter must be split along it.

    Args:
      subscripts: in the form "ij,jk->ik", without ellipses.
      operands: arrays on one mesh of explicit axes.

    Raises:
      ValueError: the types of the operands do not fit each other, or an operand is partial.
    """
    inputs, result = _parse(subscripts, operands)
    types: dict[str, ShardingType] = {}
    known = [sbp_of(x) for x in operands]
    for axis in known[0]:
        letter = _split_letter(axis, inputs, [kinds[axis] for kinds in known])
        if letter is not None:
            types[axis] = split(result.index(letter)) if letter in result else partial
    sharding = sbp_sharding(jax.typeof(operands[0]).sharding.mesh, types, len(result))
    return jnp.einsum(subscripts, *operands, out_sharding=sharding)


def _parse(subscripts: str, operands: Sequence[jax.Array]) -> tuple[list[str], str]:
    """Parse and check einsum subscripts: return the letters of each operand, and those of the result."""
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    letters = all(c in string.ascii_letters for word in (*inputs, result) for c in word)
    if not arrow or not letters or [len(word) for word in inputs] != [x.ndim for x in operands]:
        shapes = ", ".join(str(list(x.shape)) for x in operands)
        raise ValueError(
            f"subscripts must name every dim of the operands {shapes} as in 'ij,jk->ik'; got {subscripts}."
        )
    return inputs, result


def _split_letter(axis: str, inputs: Sequence[str], kinds: Sequence[ShardingType]) -> str | None:
    """Return the einsum letter that a mesh axis splits, or None; refuse operands that disagree about it."""
    if partial in kinds:
        raise ValueError(
            f"operand {kinds.index(partial)} is partial along {axis!r}; sum it by redistribute(x, {{...}}) first."
        )
    letters = {word[kind.dim] for word, kind in zip(inputs, kinds, strict=True) if isinstance(kind, Split)}
    if len(letters) > 1:
        raise ValueError(f"{axis!r} splits different letters of the operands: {', '.join(sorted(letters))}.")
    for letter in letters:
        whole = [i for i, word in enumerate(inputs) if letter in word and not isinstance(kinds[i], Split)]
        if whole:
            raise ValueError(
                f"{axis!r} splits {letter!r}, but operand {whole[0]} is broadcast along it; redistribute it to "
                f"split({inputs[whole[0]].index(letter)}), which sends nothing."
            )
        return letter
    return None
