"""Finds damaged checkpoints: the processes of a run divide the reading of files and agree on the result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxstack.checkpoint import manifest
from jaxstack.distributed import coordination


class DamageFinder:
    """Compares checkpoints with their manifests of file hashes, and remembers intact ones until they are written to."""

    def __init__(self) -> None:
        self._intact: dict[int, Any] = {}

    def find(self, path: Path, step: int) -> str | None:
        """Return what is damaged in a checkpoint, beginning with the file's name; None if it is intact.

        Every process must call it.

        Args:
          path: the checkpoint.
          step: its step.
        """
        damage = None
        seen = manifest.signature(path)
        if coordination.all_true(seen is not None and self._intact.get(step) == seen):
            return None
        try:
            manifest.check(path, step, coordination.process_position())
        except manifest.Damaged as error:
            damage = str(error)
        if not coordination.all_true(damage is None):
            return damage or _name_damage(path, step)
        self._intact[step] = seen
        return None


def _name_damage(path: Path, step: int) -> str:
    """Return a message about damage that another process found; only on process 0 does it name the file."""
    try:
        if coordination.is_first():
            manifest.check(path, step)
    except manifest.Damaged as error:
        return str(error)
    return "another process found a damaged file"


class DeletionCheck:
    """Checks that a newer checkpoint is intact before older ones are deleted. Used only on the first process.

    Args:
      report: called with a line about each damaged checkpoint.
    """

    def __init__(self, report: Callable[[str], None]):
        self._report = report
        self._verified: dict[int, Any] = {}

    def is_intact(self, path: Path, step: int, trusted: bool) -> bool:
        """Return True if a checkpoint's files match their hashes, so that older checkpoints may be deleted.

        Each checkpoint of an earlier start is read once.

        Args:
          path: the checkpoint.
          step: its step.
          trusted: this process has just written it, so that it need not be read.
        """
        seen = manifest.signature(path)
        known = trusted or (seen is not None and self._verified.get(step) == seen)
        if not known and not self._passes(path, step, hashes=True):
            return False
        self._verified[step] = seen
        return True

    def has_right_sizes(self, path: Path, step: int) -> bool:
        """Return True if a checkpoint's files have the sizes recorded in it; their contents are not read."""
        return self._passes(path, step, hashes=False)

    def _passes(self, path: Path, step: int, *, hashes: bool) -> bool:
        """Return True if a checkpoint passes the check of its sizes, or of its hashes too; report what is damaged."""
        try:
            manifest.check(path, step, hashes=hashes)
        except manifest.Damaged as damage:
            self._report(f"checkpoint {path} is damaged and does not count towards checkpoint.keep: {damage}")
            return False
        return True
