"""Describes how parameters and train state are sharded over the mesh, without needing any device."""

import math
import re
from typing import Any

import jax
import numpy as np

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.parallel.rules import AxisRules, axes_of, is_matrix


def describe_shardings(
    module: ModuleArrays, params: Dict, optimizer: Any, others: Any, *, rules: AxisRules, zero: int
) -> dict[str, Any]:
    """Return JSON-compatible dicts with each parameter's sharding and the train state's bytes per device, for reports.

    Args:
      module: the module, which knows the logical axes of its parameters.
      params: `jax.ShapeDtypeStruct` with shardings of the parameters; a mesh without devices
        (`jax.sharding.AbstractMesh`) will do.
      optimizer: the same of the optimizer's state.
      others: the same of everything else, which is replicated.
      rules: the mapping of logical axes onto the mesh.
      zero: `StepLayout.zero`.

    Returns:
      `mesh`: axis -> degree where above 1; `parameters`: a row for each parameter, one row for those that differ only
      in the number of their layer; `device_bytes`: bytes on each device between steps of parameters, optimizer state
      and everything else; `unsplit`: for each axis that should split all matrices, those that it does not divide, see
      `describe_unsplit`.
    """
    names = module.map_parameters(lambda names, shape, _: tuple(names or (None,) * len(shape)), rules)
    logical = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    leaves, _ = name_leaves(params)
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    rows: dict[Any, dict[str, Any]] = {}
    lacking: dict[str, list[tuple[int, ...]]] = {}
    splitting = (*rules.weight_axes, *(["data"] if zero and rules.mesh.shape["data"] > 1 else []))
    for (path, leaf), axes in zip(leaves.items(), logical, strict=True):
        row = _row(leaf, axes)
        known = rows.setdefault((re.sub(r"\d+", "*", path), str(row)), {"parameter": path, "arrays": 0, **row})
        known["arrays"] += 1
        if is_matrix(axes, leaf.shape):
            for axis in rules.lacking(leaf.sharding.spec, splitting):
                lacking.setdefault(axis, []).append(leaf.shape)
    for (path, _), row in rows.items():
        if row["arrays"] > 1:
            row["parameter"] = path
    return {
        "mesh": {axis: size for axis, size in rules.mesh.shape.items() if size > 1},
        "parameters": list(rows.values()),
        "device_bytes": {
            "parameters": _device_bytes(params),
            "optimizer": _device_bytes(optimizer),
            "other": sum(_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)),
        },
        "unsplit": {
            axis: {"degree": rules.mesh.shape[axis], "share": sum(map(math.prod, shapes)) / total}
            for axis, shapes in lacking.items()
        },
    }


def describe_unsplit(sharding: dict[str, Any]) -> list[str]:
    """Return a warning for each mesh axis over which a tenth or more of the parameters is replicated.

    Args:
      sharding: as `describe_shardings` returns.
    """
    found = []
    for axis, row in sharding.get("unsplit", {}).items():
        if row["share"] >= 0.1:
            degree = row["degree"]
            found.append(
                f"parallel.{axis} ({degree}) divides no dim of {row['share']:.0%} of the parameters, which every "
                f"device stores whole, with their optimizer state; make model.hidden_size or model.intermediate_size a "
                f"multiple of {degree}, or choose a degree that divides them (a power of two for most models)."
            )
    return found


def _row(leaf: jax.ShapeDtypeStruct, logical: tuple[str | None, ...]) -> dict[str, Any]:
    sharding = leaf.sharding
    shape = sharding.shard_shape(leaf.shape)
    spec = [list(axes_of(part)) for part in sharding.spec]
    return {
        "shape": list(leaf.shape),
        "logical_axes": list(logical),
        "mesh_axes": spec + [[] for _ in leaf.shape[len(spec) :]],
        "device_shape": list(shape),
        "device_bytes": _bytes(shape, leaf.dtype),
    }


def _device_bytes(tree: Any) -> int:
    return sum(_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
