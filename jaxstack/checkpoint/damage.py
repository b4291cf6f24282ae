"""Finds damaged checkpoints. The processes of a run divide the reading and agree on the result."""

from pathlib import Path
from typing import Any

from jaxstack.checkpoint import manifest
from jaxstack.distributed import coordination as processes


class DamageFinder:
    """Compares checkpoints with their manifests. Remembers which are intact, until somebody writes to them."""

    def __init__(self) -> None:
        self._intact: dict[int, Any] = {}

    def find(self, path: Path, step: int) -> str | None:
        """Return the damage of a checkpoint, beginning with the file's name; None if it has none.

        Every process must call it.

        Args:
          path: the checkpoint.
          step: its step.
        """
        damage = None
        seen = manifest.signature(path)
        if processes.all_true(seen is not None and self._intact.get(step) == seen):
            return None
        try:
            manifest.check(path, step, processes.position())
        except manifest.Damaged as error:
            damage = str(error)
        if not processes.all_true(damage is None):
            return damage or _name_damage(path, step)
        self._intact[step] = seen
        return None


def _name_damage(path: Path, step: int) -> str:
    """Return the damage that another process found in its share; only the first process names the file."""
    try:
        if processes.is_first():
            manifest.check(path, step)
    except manifest.Damaged as error:
        return str(error)
    return "another process found a damaged file"
