"""The folder in host memory where copies of a run's state outlive its processes. Imports no jax.

The launcher makes it before it starts the processes of a node, and removes it when it ends:

    FOLDER/own/PART/STEP/         the copy that a process of this node made after STEP steps
    FOLDER/neighbour/PART/STEP/   a second copy, which a process of this node received
    FOLDER/fetched/RANK/PART/     what process RANK of this node fetched of other nodes' copies, while it restores

PART is `RANKofCOUNT`, such as 0of2: a start of the run with other nodes has other ranks, or another number of them, and
reads the copies of the start before. The files of a copy are those of `shard_files`. A copy is written as
`.writing-STEP` and renamed when it is complete.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

VARIABLE = "JAXSTACK_MEMORY_FOLDER"
"""Environment variable in which the launcher tells its processes the folder."""
SHARED_MEMORY = Path("/dev/shm")
_KINDS = ("own", "neighbour")
_PART = re.compile(r"(\d{1,9})of(\d{1,9})")


@dataclasses.dataclass(frozen=True, order=True)
class Part:
    """The share of a run's state that one process copies: the process's index, and the number of processes."""

    rank: int
    count: int

    def __str__(self) -> str:
        return f"{self.rank}of{self.count}"


def read_part(text: str) -> Part | None:
    """Return the part that a text such as `0of2` names; None if it names none."""
    match = _PART.fullmatch(text)
    return None if match is None else Part(int(match[1]), int(match[2]))


def make_folder(place: Path = SHARED_MEMORY) -> Path | None:
    """Create a private folder (mode 0700) in host memory and return it; None if there is no such file system."""
    try:
        return Path(tempfile.mkdtemp(prefix="jaxstack-memory-", dir=place))
    except OSError:
        return None


def used_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder, which other processes may be changing."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


class Copies:
    """The copies of one process's state, one folder a step; writing a new one leaves the complete ones untouched.

    Args:
      folder: the folder of the process's copies, made when the first one is written.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def steps(self) -> list[int]:
        """Return the steps of the complete copies in ascending order."""
        try:
            return sorted(int(name) for name in os.listdir(self._folder) if name.isdigit())
        except OSError:
            return []

    def path(self, step: int) -> Path:
        """Return the folder of the complete copy of `step`."""
        return self._folder / str(step)

    def staging(self, step: int) -> Path:
        """Return the folder in which the copy of `step` is written."""
        return self._folder / f".writing-{step}"

    def begin(self, step: int) -> Path:
        """Make an empty folder for a new copy of `step` and return it.

        Raises:
          OSError: it cannot be made.
        """
        staging = self.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def commit(self, step: int) -> Path:
        """Turn the written copy of `step` into a complete one, in place of an earlier copy of this step."""
        shutil.rmtree(self.path(step), ignore_errors=True)
        os.rename(self.staging(step), self.path(step))
        return self.path(step)

    def keep(self, steps: Collection[int]) -> None:
        """Delete all copies but the complete ones of `steps`."""
        kept = {str(step) for step in steps}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name not in kept:
                    shutil.rmtree(self._folder / name, ignore_errors=True)


def own_copies(folder: Path, part: Part) -> Copies:
    """Return the copies that the process of this node with this part has made."""
    return Copies(folder / "own" / str(part))


def held_copies(folder: Path, part: Part) -> Copies:
    """Return the second copies of a part that this node holds."""
    return Copies(folder / "neighbour" / str(part))


def fetched_folder(folder: Path, rank: int) -> Path:
    """Return the folder for the files that process `rank` of this node fetches of other nodes' copies."""
    return folder / "fetched" / str(rank)


def all_copies(folder: Path) -> dict[str, Copies]:
    """Return all copies of this node, of earlier starts too, by their place in the folder, such as `own/0of2`."""
    found = {}
    for kind in _KINDS:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(folder / kind) if read_part(name) is not None)
            found |= {f"{kind}/{name}": Copies(folder / kind / name) for name in names}
    return found
