"""DiLoCo between separately started runs, one worker each, which exchange updates through files in a shared folder.

Nothing connects the workers but these files, so that one can end, fail or fall behind while the others go on. The
folder of exchange N holds `WORKER-PROCESS.npz`, the changes that a worker's process contributes, and `members.json`,
the workers whose changes count. The first worker that has waited long enough, or found all others, writes the latter,
once and for all: every worker computes the same mean, whenever it reads the files.
"""

import contextlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, model_validator

from jaxstack.distributed.coordination import all_true
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import replacing
from jaxstack.local_sgd.base import Dict, OuterState
from jaxstack.local_sgd.diloco import DiLoCoExchange, OuterSGD

_LOOK_SECONDS = 0.05
_FIRST_WAIT = 10
"""Multiple of `wait_seconds` for the first exchange after a start, as workers start at different times."""

Arrays = list[np.ndarray]


class FolderDiLoCo(OuterSGD):
    """DiLoCo between separately started runs, one worker each, which exchange updates through a shared folder.

    The other sections describe one worker: its devices, and `train.global_batch_size` of its part of the batch.
    """

    name: Literal["folder"] = "folder"
    folder: str = Field(min_length=1)
    """Directory that all workers reach, a new one for each training. All workers start from the same parameters: give
    them the same `run.seed` or `run.init_from`, and different `run.name`."""
    count: int = Field(ge=1)
    """Number of workers."""
    worker: int = Field(ge=0)
    """Index of this one, from 0; it reads this part of each batch of all workers."""
    wait_seconds: float = Field(default=60.0, gt=0)
    """Time that an exchange waits for workers that took part in the previous one, and ten times that in the first one
    after a start. Then it goes on without them."""
    keep: int = Field(default=50, ge=2)
    """Exchanges whose files are kept. A worker that resumes from an older checkpoint cannot catch up."""

    @model_validator(mode="after")
    def _check(self) -> "FolderDiLoCo":
        if self.worker >= self.count:
            raise ValueError(f"worker ({self.worker}) must be below count ({self.count}), as workers count from 0.")
        if self.synchronous_steps:
            raise ValueError("separate runs take no synchronous_steps; start from a run with run.init_from instead.")
        return self

    def build(self, workers: int, stacked: Mapping[str, Any]) -> "FolderExchange":
        return FolderExchange(self)


class FolderExchange(DiLoCoExchange):
    """DiLoCo's exchange through files in a shared folder. It runs on the host between steps, not in a JAX program.

    Args:
      settings: folder, waiting times and outer optimizer.
    """

    def __init__(self, settings: FolderDiLoCo):
        self.mean = FolderMean(settings)
        super().__init__(settings, self.mean)

    def __call__(self, phase: int, params: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Exchange parameters with other runs through the folder, missed rounds too; return them and the state."""
        params, state = super().__call__(phase, params, state)
        late = 0
        # A process that looks later may find more exchanges; all of this worker's processes take over the same.
        while all_true(self.mean.is_closed(int(state.shared["round"]))):
            progress, kept = self.mean.read(params, state)
            params, state = self.apply(progress, kept)
            late += 1
        if late:
            self.mean.say(f"caught up with the other workers: took over {late} further exchanges")
        return params, state


class FolderMean:
    """Averages parameter changes over workers that are separate runs, through files in a shared folder.

    The state holds `round`, the number of completed exchanges.

    Args:
      settings: folder and waiting times.
    """

    def __init__(self, settings: FolderDiLoCo):
        self._settings = settings
        self._root = Path(settings.folder).expanduser()
        self._waited_for_all = False
        self.say: Callable[[str], None] = print
        """Reports a message."""
        self.alive: Callable[[], None] = lambda: None
        """Called now and then while waiting, as a sign of life."""

    def init(self, tree: Dict) -> OuterState:
        """Return the state at the start of a run: the number of completed exchanges, which is 0."""
        return OuterState({"round": jnp.zeros((), jnp.int32)}, {})

    def __call__(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Write this run's changes to a file, wait for other runs' files; return the mean and the new state."""
        number = int(state.shared["round"])
        if number == 0:
            self._check_start(state.shared["anchor"])
        own = self._file(number, self._settings.worker)
        try:
            # Checked even if the folder exists: another worker may be deleting it, and if `members.json` goes first,
            # the remaining files would look like a new exchange.
            if self._newest() >= number + self._settings.keep:
                raise self._lost(number, "it is deleted")
            own.parent.mkdir(parents=True, exist_ok=True)
            if not own.exists():  # what others may have read must not change
                with replacing(own) as file:
                    np.savez(file, *local_arrays(tree))
        except OSError as error:
            raise cannot_write(f"the exchange in {own.parent}", error) from None
        self._wait(number)
        shutil.rmtree(self._folder(number - self._settings.keep), ignore_errors=True)
        return self.read(tree, state)

    def read(self, tree: Dict, state: OuterState) -> tuple[Dict, OuterState]:
        """Average the runs' files of a completed exchange; return the mean, sharded as `tree`, and the new state.

        Raises:
          JaxstackError: its files are deleted or damaged.
        """
        number = int(state.shared["round"])
        mean = [np.zeros_like(x) for x in local_arrays(tree)]
        try:
            members = self._members(number)
            for worker in members:
                for total, x in zip(mean, read_arrays(self._file(number, worker)), strict=True):
                    total += x / np.float32(len(members))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise self._lost(number, error) from None
        after = OuterState({**state.shared, "round": state.shared["round"] + 1}, state.own)
        return with_local_arrays(tree, mean), after

    def is_closed(self, number: int) -> bool:
        """Return True if it is settled which runs take part in exchange `number`, so that its mean can be read."""
        return (self._folder(number) / "members.json").exists()

    def _lost(self, number: int, reason: object) -> JaxstackError:
        return JaxstackError(
            f"exchange {number} of workers cannot be read from {self._root}: {reason}. If the checkpoint is older than "
            "the kept exchanges (local_sgd.keep), put a copy of another worker's run directory, which has a newer "
            "checkpoint, in place of this one's."
        )

    def _wait(self, number: int) -> None:
        """Wait for the runs' files of an exchange until all exist or time is up; record which runs take part."""
        settings = self._settings
        seconds = settings.wait_seconds * (1 if self._waited_for_all else _FIRST_WAIT)
        deadline = time.monotonic() + seconds
        while not self.is_closed(number):
            present = {worker for worker in range(settings.count) if self._is_present(number, worker)}
            if self._awaited(number) <= present or time.monotonic() > deadline:
                self._close(number, sorted(present))
            else:
                self.alive()
                time.sleep(_LOOK_SECONDS)
        absent = self._awaited(number) - set(self._members(number))
        if settings.worker in absent:
            self.say(f"warning: exchange {number} went on without this worker, whose changes since the last are lost")
        elif absent:
            self.say(f"warning: exchange {number} went on without {_names(absent)}")
        self._waited_for_all = True

    def _awaited(self, number: int) -> set[int]:
        """Return the indices of the workers whose files exchange `number` waits for."""
        workers = range(self._settings.count)
        if not self._waited_for_all or number == 0:
            return set(workers)
        return {worker for worker in workers if self._is_present(number - 1, worker)} | {self._settings.worker}

    def _close(self, number: int, members: list[int]) -> None:
        """Record which workers' changes count in an exchange, unless another process has done so already."""
        write_once(self._folder(number) / "members.json", json.dumps(members), self._writer)

    def _check_start(self, params: Dict) -> None:
        """Check that the folder belongs to runs with the same initial parameters and outer optimizer.

        Raises:
          ConfigError: it does not.
        """
        settings = self._settings.model_dump(include={"every", "count", "outer_learning_rate", "momentum"})
        mine = {**settings, "parameters": float(sum(np.abs(x).sum(dtype=np.float64) for x in local_arrays(params)))}
        path = self._root / f"start-{jax.process_index()}.json"
        self._root.mkdir(parents=True, exist_ok=True)
        write_once(path, json.dumps(mine), self._writer)
        found = json.loads(path.read_text(encoding="utf-8"))
        if different := [name for name in mine if mine[name] != found.get(name)]:
            name = different[0]
            raise ConfigError(
                f"local_sgd.folder {self._root} belongs to workers with another value of {name}: {found.get(name)}, "
                f"here {mine[name]}. Use a new folder for each training, and the same settings, run.seed and "
                "run.init_from on all workers."
            )

    @property
    def _writer(self) -> str:
        return f"{self._settings.worker}-{jax.process_index()}"

    def _members(self, number: int) -> list[int]:
        return json.loads((self._folder(number) / "members.json").read_text(encoding="utf-8"))

    def _newest(self) -> int:
        """Return the largest N of the subfolders `exchange-N` in the shared folder; -1 if there are none."""
        return max((int(path.name.split("-")[1]) for path in self._root.glob("exchange-*")), default=-1)

    def _is_present(self, number: int, worker: int) -> bool:
        return all(self._file(number, worker, process).exists() for process in range(jax.process_count()))

    def _folder(self, number: int) -> Path:
        return self._root / f"exchange-{number}"

    def _file(self, number: int, worker: int, process: int | None = None) -> Path:
        return self._folder(number) / f"{worker}-{jax.process_index() if process is None else process}.npz"


def read_arrays(path: Path) -> Arrays:
    """Read the arrays of an npz file in the order in which `np.savez` was given them."""
    with np.load(path) as stored:
        return [stored[f"arr_{index}"] for index in range(len(stored.files))]


def local_arrays(tree: Dict) -> Arrays:
    """Return the shards of a tree's arrays that this process holds, each once even if several devices have it."""
    return [
        np.asarray(shard.data)
        for leaf in jax.tree.leaves(tree)
        for shard in {_key(shard.index): shard for shard in leaf.addressable_shards}.values()
    ]


def with_local_arrays(tree: Dict, arrays: Arrays) -> Dict:
    """Build a tree with the shapes and shardings of `tree` from this process's shards, in `local_arrays` order."""
    rest = iter(arrays)

    def rebuild(leaf: jax.Array) -> jax.Array:
        parts = {_key(shard.index): None for shard in leaf.addressable_shards}
        values = {key: next(rest) for key in parts}
        placed = [jax.device_put(values[_key(shard.index)], shard.device) for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)

    return jax.tree.map(rebuild, tree)


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)


def write_once(path: Path, text: str, writer: str) -> None:
    """Write a file atomically unless it exists already; if several processes try at once, exactly one succeeds.

    Args:
      path: the file.
      text: its content.
      writer: name of this writer, which no other has.
    """
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    temporary.write_text(text, encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink(missing_ok=True)


def _names(workers: set[int]) -> str:
    return ("workers " if len(workers) > 1 else "worker ") + ", ".join(map(str, sorted(workers)))
