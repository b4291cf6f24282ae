"""The checkpoints of a training run: restored at its start, saved as it trains, rolled back after skipped steps."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.checkpoint.memory import MemoryCheckpoints
from jaxstack.config.features import Fixed
from jaxstack.data.fingerprint import data_difference, fingerprint_difference, shared_keys
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError

_DATA = "samples.npz"
"""File of a checkpoint with the state of the data, if it has any."""
_WAITING = "waiting_metrics.npz"
"""File of a checkpoint with the metrics until its step for which a full disk had no room, if there were any."""


class Restored(NamedTuple):
    """The content of a checkpoint that a run continues from: step, train state, and record of skipped steps."""

    step: int
    state: Any
    """The train state, as `Trainer.stored_state`."""
    skipped: Any
    """The record of skipped steps that was saved with it, or None."""
    data: Mapping[str, np.ndarray]
    """State of the data, see `Training.data_state`; {} if there was none."""
    source: str
    """Name of the checkpoint or of the copies in memory, for a message."""
    train_seconds: float | None = None
    """Time of the steps up to it, see `RunLog.train_seconds`; None: not known."""
    waiting: Mapping[str, bytes] = MappingProxyType({})
    """Metrics until this step that are in no line of the log, see `RunLog.waiting`."""


class RunCheckpoints:
    """Saves and restores the train state of one run; checks on restoring that its training data is unchanged.

    Args:
      manager: writes and reads the checkpoints.
      run_dir: the run's directory, for messages.
      data: fingerprint of the data, on which the position in it depends.
      sources: the files of the data, as `jaxstack.data.fingerprint.list_sources`; None: not known.
      settings: the sections of the configuration that decide the result, of which each checkpoint has a copy.
      accept_data_change: `resilience.accept_data_change`.
      say: reports a message.
      memory: the copies of the state in host memory; None: there are none.
      fixed: section of the configuration -> what a run that goes on must not change in it.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        run_dir: Path,
        *,
        data: Mapping[str, Any],
        settings: Mapping[str, Any],
        sources: list[dict[str, Any]] | None = None,
        accept_data_change: bool,
        say: Callable[[str], None],
        memory: MemoryCheckpoints | None = None,
        fixed: Mapping[str, Fixed] = MappingProxyType({}),
    ):
        self.manager = manager
        self.memory = memory
        self._run_dir = run_dir
        self._say = say
        self._sources = sources
        self._data = data
        self._settings = settings
        self._fixed = fixed
        self._accepts_data_change = accept_data_change
        self.saved_step = -1
        """The step of the newest checkpoint on disk that was restored or saved; -1: none."""

    def restore(self, abstract: Any, later: Mapping[str, Callable[[], Any]]) -> Restored | None:
        """Restore the train state from the newest intact copy in memory or checkpoint; None if there is neither.

        A copy in memory is used if no intact checkpoint on disk is newer.

        Args:
          abstract: shapes, dtypes and shardings of the state.
          later: fields of the state that older checkpoints lack, and what each is then.

        Raises:
          ConfigError: the checkpoint is not of a training run, the data has changed and that is not accepted, or a
            section has changed that a run keeps.
        """
        source, step = self._newest()
        if step is None:
            self._forget_copies(None)
            return None
        extra: Any = source.extra(step)
        saved = extra.get("data") if isinstance(extra, dict) else None
        if saved is None:
            raise ConfigError(
                f"{self._run_dir} holds parameters (converted, or saved by another program), not a training run: start "
                f"one with another run.name and run.init_from={self._run_dir}."
            )
        difference = data_difference(saved, self._data, extra.get("sources"), self._sources)
        if difference:
            self._accept_data(difference)
        before = extra.get("settings") or {}
        for section, fixed in self._fixed.items():
            self._check_fixed(step, section, fixed, before.get(section))
        if isinstance(source, MemoryCheckpoints):
            state = source.restore(step)
            where = f"from memory: {source.sources}"
        else:
            state, _ = source.restore(step, abstract, later=later)
            where = f"{self._run_dir}/checkpoints"
            self.saved_step = step
        if changed := fingerprint_difference(before, shared_keys(before, self._settings)):
            self._say(f"warning: not as checkpoint {step} was trained: {changed}")
        data = _arrays_of(source.read_file(step, _DATA))
        waiting = _arrays_of(source.read_file(step, _WAITING))
        if isinstance(source, MemoryCheckpoints):  # they are in one process's copies, which others may have
            told = coordination.all_gather_arrays("waiting-metrics", waiting)
            waiting = next((arrays for arrays in told if arrays), {})
        self._forget_copies(step if source is self.memory else None)
        content = {name: array.tobytes() for name, array in waiting.items()}
        return Restored(step, state, extra.get("skipped"), data, where, extra.get("train_seconds"), content)

    def is_in_memory_only(self, step: int) -> bool:
        """Return True if the restored state of `step` is not on disk; all processes must call it."""
        return step != self.saved_step and coordination.broadcast_from_first(step not in self.manager.all_steps())

    def _newest(self) -> tuple[CheckpointManager | MemoryCheckpoints, int | None]:
        """Return what has the newest intact state, and its step; None if nothing has any."""
        if self.memory is None:
            return self.manager, self.manager.latest_step()
        # Of the checkpoints on disk only the names are read, as their hashes take longer than to restore from memory.
        newest = coordination.broadcast_from_first(max(self.manager.all_steps(), default=0))
        copied = self.memory.latest_step(newest)
        if copied is None:
            saved = self.manager.latest_step()
            if saved is None or saved == newest:
                return self.manager, saved
            copied = self.memory.latest_step(saved)  # the newer ones on disk are damaged
            if copied is None:
                return self.manager, saved
        return self.memory, copied

    def _forget_copies(self, step: int | None) -> None:
        """Delete the copies in memory but that of `step`, from which the run goes on; None: all."""
        if self.memory is not None:
            self.memory.keep(step)

    def _check_fixed(self, step: int, section: str, fixed: Fixed, saved: Any) -> None:
        """Raise ConfigError if a section is not the one that the checkpoint's parameters were trained with."""
        found = self._settings.get(section)
        if saved is None or found is None:
            return
        kept = _without(saved, fixed.free)
        difference = fingerprint_difference({section: kept}, {section: _without(shared_keys(saved, found), fixed.free)})
        if difference:
            raise ConfigError(
                f"a run goes on with {fixed.what} that it was trained with; at checkpoint {step} of {self._run_dir}, "
                f"{difference}. Set it back, or start a new run with another run.name and run.init_from="
                f"{self._run_dir}, {fixed.new_run}."
            )

    def _accept_data(self, difference: str) -> None:
        said = f"the data is not what {self._run_dir} was trained on: {difference}"
        if not self._accepts_data_change:
            raise ConfigError(
                f"{said}. Set it back, start a new run with another run.name, or go on with "
                "resilience.accept_data_change=true."
            )
        self._say(f"warning: {said}; going on, as resilience.accept_data_change is set")

    def save(
        self,
        step: int,
        state: Any,
        skipped: Any,
        data: Mapping[str, np.ndarray] | None = None,
        train_seconds: float | None = None,
        waiting: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Begin to save the train state reached after `step` steps, with the record of skipped steps.

        Args:
          step: number of steps.
          state: the train state.
          skipped: the record.
          data: state of the data, see `Training.data_state`.
          train_seconds: time of the steps so far, see `RunLog.train_seconds`.
          waiting: metrics that are in no line of the log, see `RunLog.waiting`.
        """
        self.manager.save(step, state, self._extra(step, skipped, train_seconds), files=_files_of(data, waiting))
        self.saved_step = step

    def copy(
        self,
        step: int,
        state: Any,
        skipped: Any,
        data: Mapping[str, np.ndarray] | None = None,
        train_seconds: float | None = None,
        waiting: Mapping[str, bytes] = MappingProxyType({}),
        *,
        steps_grow: bool = False,
    ) -> None:
        """Begin to copy to host memory what `save` saves on disk; for `steps_grow` see `MemoryCheckpoints.copy`."""
        if self.memory is not None:
            extra = self._extra(step, skipped, train_seconds)
            self.memory.copy(step, state, extra, _files_of(data, waiting), steps_grow=steps_grow)

    def leave_devices(self) -> None:
        """Wait until no copy of the state is on the devices; see `MemoryCheckpoints.leave_devices`."""
        if self.memory is not None:
            self.memory.leave_devices()

    def wait(self) -> None:
        """Wait until nothing is being saved or copied.

        Raises:
          JaxstackError: the last save was not committed.
        """
        if self.memory is not None:
            self.memory.wait()
        self.manager.wait()

    def _extra(self, step: int, skipped: Any, train_seconds: float | None) -> dict[str, Any]:
        """Return the plain data of a checkpoint after `step` steps."""
        return {
            "batches": step,
            "data": dict(self._data),
            "sources": self._sources,
            "skipped": skipped,
            "settings": dict(self._settings),
            "train_seconds": train_seconds,
        }

    def roll_back(self, step: int) -> str:
        """Delete checkpoints newer than `step`, if an older one exists; return a message naming the newest one left."""
        if self.memory is not None:
            self.memory.discard_newer(step)
        newest = self.manager.latest_step()
        if newest is not None and newest > step and any(saved <= step for saved in self.manager.all_steps()):
            self.manager.discard_newer(step)
            newest = self.manager.latest_step()
        if newest is None:
            return "no checkpoint was saved before them"
        return f"rolled back to checkpoint {newest}, from which the same command goes on"


def _files_of(data: Mapping[str, np.ndarray] | None, waiting: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a checkpoint beside its state: compressed .npz files of what is not empty."""
    contents = {_DATA: data, _WAITING: {name: np.frombuffer(content, np.uint8) for name, content in waiting.items()}}
    files = {}
    for name, arrays in contents.items():
        if arrays:
            file = io.BytesIO()
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType] - no name is that of its own parameter
            files[name] = file.getvalue()
    return files


def _arrays_of(content: bytes | None) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file; {} without a file."""
    if content is None:
        return {}
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def _without(settings: Any, keys: Sequence[str]) -> Any:
    """Return plain data without the entries `keys` of its dicts, at every depth."""
    if isinstance(settings, Mapping):
        return {name: _without(value, keys) for name, value in settings.items() if name not in keys}
    if isinstance(settings, list | tuple):
        return [_without(value, keys) for value in settings]
    return settings
