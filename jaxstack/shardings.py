"""Where every parameter lies on the mesh, and what a device holds of the state; no device is needed to tell."""

import math
import re
from typing import Any

import jax
import optax

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.functional import FunctionalModule
from jaxstack.parallel.rules import AxisRules, axes_of
from jaxstack.state import TrainState, abstract_state


def describe_shardings(
    module: FunctionalModule, optimizer: optax.GradientTransformation, rules: AxisRules, shardings: TrainState
) -> dict[str, Any]:
    """The layout of the train state as plain JSON, for `environment.json`, the report and `jaxstack plan`.

    Args:
      shardings: of the state, by `state_shardings`; a mesh without devices (`jax.sharding.AbstractMesh`) will do.

    Returns:
      `mesh`: axis -> degree where above 1; `parameters`: a row for each, those that differ in the number of their layer
      alone in one; `device_bytes`: what a device holds between steps of parameters, optimizer state and all else.
    """
    abstract = abstract_state(module, optimizer)
    names = module.map_parameters(lambda names, shape, _: tuple(names or (None,) * len(shape)), rules)
    logical = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    leaves, _ = name_leaves(abstract.params)
    rows: dict[Any, dict[str, Any]] = {}
    for (path, leaf), axes, sharding in zip(leaves.items(), logical, jax.tree.leaves(shardings.params), strict=True):
        row = _row(leaf, axes, sharding)
        known = rows.setdefault((re.sub(r"\d+", "*", path), str(row)), {"parameter": path, "arrays": 0, **row})
        known["arrays"] += 1
    for (path, _), row in rows.items():
        if row["arrays"] > 1:
            row["parameter"] = path
    others = (abstract.step, abstract.rest, abstract.key, abstract.history)
    return {
        "mesh": {axis: size for axis, size in rules.mesh.shape.items() if size > 1},
        "parameters": list(rows.values()),
        "device_bytes": {
            "parameters": _device_bytes(abstract.params, shardings.params),
            "optimizer": _device_bytes(abstract.optimizer, shardings.optimizer),
            "other": sum(_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(others)),
        },
    }


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
