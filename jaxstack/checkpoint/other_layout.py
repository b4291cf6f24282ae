"""Gathers the shards that a process needs from the copies in memory that processes of another layout made.

After a loss of nodes the run goes on with fewer processes, of which each has larger or other shards. A process reads
the index of one copy of each part, finds the files that hold its shards, and fetches those of other nodes. Files are
checked by their hashes; instead of a damaged one the other copy of its part is used, or a replica in another part.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxstack.checkpoint import manifest, shard_files
from jaxstack.checkpoint.memory_folder import Part
from jaxstack.errors import JaxstackError


@dataclasses.dataclass(frozen=True)
class PartCopy:
    """A copy of one part that a process can read: in its own node's memory, or over the network."""

    part: Part
    place: str
    """Its place in its node's folder, such as `own/0of2`."""
    root: Path
    """The copy; on another node's, an empty folder into which `fetch` reads files of it."""
    fetch: Callable[[Iterable[str]], None] | None = None
    """Fetches files into `root`; None: they are there."""

    def check(self, step: int, names: Sequence[str]) -> dict[str, Any]:
        """Make files be there, check them and the index by their hashes, and return the index.

        Raises:
          manifest.Damaged: one has changed.
          OSError: one cannot be fetched.
        """
        if self.fetch is not None:
            self.fetch(names or (manifest.INDEX, manifest.MANIFEST))
        return manifest.check(self.root, step, names=names)


@dataclasses.dataclass
class Gathered:
    """Result of `gather`: the folders to read from, or why there are none."""

    folders: list[shard_files.Folder] = dataclasses.field(default_factory=list)
    """Folders that have all shards of this process between them; the first one has the files without arrays too."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Messages about copies that were passed over."""
    missing: str | None = None
    """First shard of which no intact copy is left; None if there are all."""


def gather(
    copies: Iterable[PartCopy], step: int, targets_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Gathered:
    """Find and fetch the files that hold this process's shards of the state after `step` steps.

    Args:
      copies: of one start of the run, in the order in which to use them.
      step: the step.
      targets_of: returns the wanted arrays of a copy's index, as for `shard_files.read`.
    """
    found = Gathered()
    usable = list(copies)
    indexes: dict[Path, dict[str, Any]] = {}

    def is_intact(copy: PartCopy, names: Sequence[str]) -> bool:
        try:
            indexes[copy.root] = copy.check(step, names)
        except (manifest.Damaged, OSError, JaxstackError) as error:
            found.notes.append(passed_over(step, copy.part, copy.place, error))
            usable.remove(copy)
            return False
        return True

    while usable:
        first_of: dict[Part, PartCopy] = {}
        for copy in usable:
            first_of.setdefault(copy.part, copy)
        chosen = list(first_of.values())
        if not all(copy.root in indexes or is_intact(copy, ()) for copy in chosen):
            continue
        known = [indexes[copy.root] for copy in chosen]
        files, found.missing = shard_files.find_files(known, targets_of(known[0]))
        if found.missing is not None:
            return found
        first = next((number for number, names in enumerate(files) if names), 0)
        files[first] |= shard_files.other_files(known[first])
        needed = [(copy, sorted(names)) for copy, names in zip(chosen, files, strict=True) if names]
        if all(is_intact(copy, names) for copy, names in needed):
            found.folders = [shard_files.Folder(copy.root, indexes[copy.root], names) for copy, names in needed]
            return found
    found.missing = "all of it"
    return found


def passed_over(step: int, part: Part, place: str, error: Exception) -> str:
    """Return the message that a copy is not used, because it is damaged or cannot be read.

    Args:
      step: the step.
      part: the part that it is of.
      place: of the copy in its node's folder, such as `own/0of2`.
      error: the reason.
    """
    whose = "its own" if place.startswith("own/") else "its neighbour's"
    copy = f"the copy of step {step} of process {part.rank} in {whose} memory"
    return f"{copy} cannot be used and is passed over: {error}"
