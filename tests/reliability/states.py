"""The arrays of a checkpoint without the program that made it, and a small state to damage."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.checkpoint.leaves import LeafSpec
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.checkpoint.manifest import read_index
from tests.checkpoint.states import raw


def read_checkpoint(run: Path, step: int) -> dict[str, bytes]:
    """Leaf -> its bits, of all that a checkpoint holds: parameters, optimizer, random keys, counters."""
    held = read_index(run / "checkpoints" / str(step))["leaves"]
    specs = {name: LeafSpec.from_json(fields) for name, fields in held.items()}
    found, _ = CheckpointManager(run / "checkpoints").restore(step, {name: _wanted(s) for name, s in specs.items()})
    return {name: raw(leaf) for name, leaf in found.items()}


def _wanted(spec: LeafSpec):
    if spec.is_python_value:
        return spec.value
    if spec.key_impl is not None:
        return jax.ShapeDtypeStruct(spec.shape, jax.random.key(0).dtype)
    return np.empty(spec.shape, jnp.dtype(spec.dtype))


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
