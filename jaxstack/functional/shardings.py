"""Where every parameter lies on the mesh, and what a device holds of the state; no device is needed to tell."""

import math
import re
from typing import Any

import jax
import optax

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.functional.module import FunctionalModule
from jaxstack.parallel.rules import AxisRules, axes_of, is_matrix
from jaxstack.state import TrainState, abstract_state


def describe_shardings(
    module: FunctionalModule,
    optimizer: optax.GradientTransformation,
    rules: AxisRules,
    shardings: TrainState,
    zero: int,
) -> dict[str, Any]:
    """The layout of the train state as plain JSON, for `environment.json`, the report and `jaxstack plan`.

    Args:
      shardings: of the state, by `state_shardings`; a mesh without devices (`jax.sharding.AbstractMesh`) will do.

    Returns:
      `mesh`: axis -> degree where above 1; `parameters`: a row for each, those that differ in the number of their layer
      alone in one; `device_bytes`: what a device holds between steps of parameters, optimizer state and all else;
      `unsplit`: by axis that should split all matrices, those whose dims it does not divide, see `describe_unsplit`.
    """
    abstract = abstract_state(module, optimizer)
    names = module.map_parameters(lambda names, shape, _: tuple(names or (None,) * len(shape)), rules)
    logical = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    leaves, _ = name_leaves(abstract.params)
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    rows: dict[Any, dict[str, Any]] = {}
    lacking: dict[str, list[tuple[int, ...]]] = {}
    splitting = (*rules.weight_axes, *(["data"] if zero and rules.mesh.shape["data"] > 1 else []))
    for (path, leaf), axes, sharding in zip(leaves.items(), logical, jax.tree.leaves(shardings.params), strict=True):
        row = _row(leaf, axes, sharding)
        known = rows.setdefault((re.sub(r"\d+", "*", path), str(row)), {"parameter": path, "arrays": 0, **row})
        known["arrays"] += 1
        if is_matrix(axes, leaf.shape):
            for axis in rules.lacking(sharding.spec, splitting):
                lacking.setdefault(axis, []).append(leaf.shape)
    for (path, _), row in rows.items():
        if row["arrays"] > 1:
            row["parameter"] = path
    others = (abstract.step, abstract.non_params, abstract.key, abstract.history)
    return {
        "mesh": {axis: size for axis, size in rules.mesh.shape.items() if size > 1},
        "parameters": list(rows.values()),
        "device_bytes": {
            "parameters": _device_bytes(abstract.params, shardings.params),
            "optimizer": _device_bytes(abstract.optimizer, shardings.optimizer),
            "other": sum(_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)),
        },
        "unsplit": {
            axis: {"degree": rules.mesh.shape[axis], "share": sum(map(math.prod, shapes)) / total}
            for axis, shapes in lacking.items()
        },
    }


def describe_unsplit(sharding: dict[str, Any]) -> list[str]:
    """A sentence for each axis that leaves a tenth or more of the parameters whole which it should split."""
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


def _row(leaf: Any, logical: tuple[str | None, ...], sharding: Any) -> dict[str, Any]:
    shape = sharding.shard_shape(leaf.shape)
    spec = [list(axes_of(part)) for part in sharding.spec]
    return {
        "shape": list(leaf.shape),
        "logical_axes": list(logical),
        "mesh_axes": spec + [[] for _ in leaf.shape[len(spec) :]],
        "device_shape": list(shape),
        "device_bytes": _bytes(shape, leaf.dtype),
    }


def _device_bytes(tree: Any, shardings: Any) -> int:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return sum(_bytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in pairs)


def _bytes(shape: Any, dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize
