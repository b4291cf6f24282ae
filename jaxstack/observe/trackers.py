"""Trackers, the destinations of a run's metrics: files, TensorBoard, Weights & Biases, MLflow."""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxstack.errors import ConfigError, is_full
from jaxstack.files import replacing


class Tracker(Protocol):
    """A destination of metrics, such as a file. Steps count completed training steps and grow from call to call."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values (plain numbers, None for unknown, short strings) after training step `step`."""

    def close(self) -> None:
        """Write buffered values. Nothing may be logged afterwards."""


class _WholeRecords:
    """A file to which records are appended whole and without buffering; what a full disk has no room for waits.

    Args:
      path: the file; it is made if it does not exist.
      first: records to write first.
      resumed: the run goes on, also on a full disk; a new run does not begin on one.

    Raises:
      OSError: the file cannot be written, unless it is for a full disk, and `resumed` is True.
    """

    def __init__(self, path: Path, first: bytes, *, resumed: bool):
        self._path = path
        self._file: io.FileIO | None = None
        self._waiting = b""
        try:
            self.append(first)
        except OSError as error:
            if not (resumed and is_full(error)):
                raise

    def append(self, record: bytes) -> None:
        """Write a record after those that wait.

        Raises:
          OSError: there was no room; nothing was written, and all of them wait for the next call.
        """
        self._waiting += record
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(self._waiting):
                written += self._file.write(self._waiting[written:]) or 0
        except OSError as error:
            self._file.truncate(end)  # no torn record
            error.filename = str(self._path)
            raise
        self._waiting = b""

    def waiting(self) -> bytes:
        """Return the records for which there is no room now."""
        with contextlib.suppress(OSError):
            self.append(b"")
        return self._waiting

    def close(self) -> None:
        try:
            self.append(b"")
        finally:
            if self._file is not None:
                self._file.close()


class JsonLines:
    """Tracker that appends one JSON object per line to a file, `{"step": ..., **values}`, at once.

    Every line is strict JSON: a value that is not finite becomes the string "NaN", "Infinity" or "-Infinity", which
    `float` parses. Opening a file drops its lines after `start_step`, which the run repeats, and an incomplete last
    line; a kill at this moment loses nothing.

    Args:
      path: the file.
      start_step: number of completed steps that the run resumes from.
      waiting: what `waiting` returned at that step; lines that are not in the file are written.
    """

    def __init__(self, path: str | Path, start_step: int = 0, waiting: bytes = b""):
        self.path = Path(path)
        if self.path.exists():
            _drop_lines(self.path, lambda line: _is_before(line, start_step))
        first = _not_in([self.path], waiting.splitlines(keepends=True))
        self._file = _WholeRecords(self.path, first, resumed=start_step > 0)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a step's values. Lines that a full disk has no room for are written as soon as there is room."""
        record = {"step": int(step)} | {key: _plain(value) for key, value in values.items()}
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n")

    def waiting(self) -> bytes:
        """Return the lines for which a full disk has no room now."""
        return self._file.waiting()

    def close(self) -> None:
        self._file.close()


def _not_in(files: Sequence[Path], records: Sequence[bytes]) -> bytes:
    """Return the records that no file has: of those that waited for room, some may have been written later."""
    written = [file.read_bytes() for file in files if file.exists()] if records else []
    return b"".join(record for record in records if not any(record in content for content in written))


def _plain(value: Any) -> Any:
    """Convert a scalar to a plain Python value for strict JSON; NaN and infinities become strings."""
    if hasattr(value, "item"):  # a NumPy or JAX scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _is_before(line: bytes, last_step: int) -> bool:
    """Return True if a line is complete and its step is at most `last_step`."""
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _drop_lines(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Atomically drop the lines of a file for which `keep` is False; a file without such lines is not touched."""
    kept = end = after = 0
    with path.open("rb") as lines:
        for line in lines:
            end += len(line)
            if not keep(line):
                continue
            after = end
            kept += len(line)
    if kept == after:  # they are the last ones: a full disk has no room for another file
        if end > after:
            os.truncate(path, after)
        return
    with path.open("rb") as lines, replacing(path) as target:
        os.fchmod(target.fileno(), path.stat().st_mode & 0o777)
        target.writelines(line for line in lines if keep(line))


_event_files = itertools.count()


class TensorBoard:
    """Tracker that writes scalars as TensorBoard event files, with TensorBoard's own records (no TensorFlow, no torch).

    TensorBoard's own file writer is not used: it writes in a thread, which ends with a traceback when the disk is full.
    A resumed run marks its start in the event file, so that TensorBoard drops the values that an earlier process wrote
    after `start_step`.

    Args:
      directory: the folder of the event files.
      start_step: number of completed steps that the run resumes from.
      waiting: what `waiting` returned at that step; records that are in no file are written.
    """

    def __init__(self, directory: str | Path, start_step: int = 0, waiting: bytes = b""):
        # Imported here: it takes a third of a second, and a run without this tracker does not need it.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The generated modules hide their classes from type checkers.
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        session: Any = vars(event_pb2)["SessionLog"]
        folder = Path(directory)
        self._to_record = RecordWriter
        # TensorBoard reads the files in the order of their names.
        number = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_event_files)}"
        version = self._event(wall_time=time.time(), file_version="brain.Event:2")
        start = self._event(wall_time=time.time(), step=start_step + 1, session_log=session(status=session.START))
        before = _not_in(sorted(folder.glob("events.out.tfevents.*")), list(_event_records(waiting)))
        first = self._record(version) + before + self._record(start)
        self._file = _WholeRecords(folder / f"events.out.tfevents.{number}", first, resumed=start_step > 0)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        scalars = [
            self._summary.Value(tag=key, simple_value=float(value))
            for key, value in numbers.items()
            if isinstance(value, int | float)
        ]
        event = self._event(wall_time=time.time(), step=int(step), summary=self._summary(value=scalars))
        self._file.append(self._record(event))

    def _record(self, event: Any) -> bytes:
        record = io.BytesIO()
        self._to_record(record).write(event.SerializeToString())
        return record.getvalue()

    def waiting(self) -> bytes:
        """Return the records for which a full disk has no room now."""
        return self._file.waiting()

    def close(self) -> None:
        self._file.close()


def _event_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: length of the event (8 bytes), checksum (4), event, checksum (4)."""
    start = 0
    while start < len(content):
        end = start + 16 + int.from_bytes(content[start : start + 8], "little")
        yield content[start:end]
        start = end


def _import_for(tracker: str, module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the tracker {tracker!r} needs the package {package}, which is not installed: "
            f"pip install 'jaxstack[{tracker}]', or take {tracker!r} out of observe.trackers"
        ) from error


def _run_id(directory: Path, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id under which a tracker knows this run, stored in its directory, and True if it is new."""
    file = directory / f"{tracker}_id.txt"
    if file.exists():
        return file.read_text().strip(), False
    directory.mkdir(parents=True, exist_ok=True)
    run_id = make()
    file.write_text(run_id + "\n")
    return run_id, True


class WandB:
    """Tracker for Weights & Biases; its run id is stored in the run directory, so that a resumed run continues it.

    Project, entity and mode come from wandb's own environment variables (`WANDB_PROJECT` falls back to
    `jaxstack`).

    Raises:
      ConfigError: the package is not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        start_step: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        wandb = _import_for("wandb", "wandb", "wandb")
        run_id, _ = _run_id(Path(directory), "wandb", lambda: os.urandom(8).hex())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxstack"),
            id=run_id,
            resume="allow",
            name=name,
            dir=str(directory),
            config=dict(settings or {}),
        )
        # wandb refuses its own step to go back, which it does when a run resumes behind its last logged line.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        known = {key: value for key, value in values.items() if value is not None}
        self._run.log({"step": int(step)} | known)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Tracker for MLflow; its run id is stored in the run directory, so that a resumed run continues it.

    Server and experiment come from mlflow's own environment variables (`MLFLOW_TRACKING_URI`; without it a folder or
    file of mlflow's choice; `MLFLOW_EXPERIMENT_NAME` falls back to `jaxstack`). A value that is not finite is left out.

    Raises:
      ConfigError: the package is not installed, or has no store: mlflow-skinny needs a server.
    """

    def __init__(
        self,
        directory: str | Path,
        start_step: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        client = _import_for("mlflow", "mlflow.tracking", "mlflow-skinny (or mlflow)").MlflowClient
        try:
            self._client = client()
            self._run_id, is_new = _run_id(Path(directory), "mlflow", lambda: self._create_run(name))
        except Exception as error:
            if not type(error).__module__.startswith("mlflow."):
                raise
            raise ConfigError(
                f"mlflow cannot store runs: {str(error).strip()[:300]} Set MLFLOW_TRACKING_URI to a server, or install "
                "the whole mlflow, which can store them in a file."
            ) from None
        if not is_new:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        for section, values in (settings or {}).items():
            for setting, value in (values if isinstance(values, Mapping) else {"": values}).items():
                self._client.log_param(self._run_id, f"{section}.{setting}".strip("."), str(value)[:500])

    def _create_run(self, name: str | None) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxstack")
        found = self._client.get_experiment_by_name(experiment)
        key = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        return self._client.create_run(key, run_name=name).info.run_id

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {key: _plain(value) for key, value in values.items()}
        for key, value in numbers.items():
            if isinstance(value, int | float):
                self._client.log_metric(self._run_id, key, float(value), step=int(step))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS: dict[str, Callable[[Path, int, bytes, Mapping[str, Any]], Tracker]] = {
    # First the file from which everything else can be made: it is written even if a later tracker fails.
    "jsonl": lambda run_dir, start, waiting, settings: JsonLines(run_dir / "metrics.jsonl", start, waiting),
    "tensorboard": lambda run_dir, start, waiting, settings: TensorBoard(run_dir / "tensorboard", start, waiting),
    "wandb": lambda run_dir, start, waiting, settings: WandB(run_dir, start, run_dir.name, settings),
    "mlflow": lambda run_dir, start, waiting, settings: MLflow(run_dir, start, run_dir.name, settings),
}


class Trackers:
    """Several trackers used as one. An error of the disk is reported once and does not stop the run."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None] = print):
        self._trackers = dict(trackers)
        self._say = say
        self._failing: set[str] = set()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, values)
            except OSError as error:
                if name not in self._failing:
                    self._say(f"warning: the metrics of step {step} could not be written ({name}): {error}")
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def waiting(self) -> dict[str, bytes]:
        """Return what a full disk has no room for, by tracker, for the trackers of a run that goes on from here."""
        files = {name: x for name, x in self._trackers.items() if isinstance(x, JsonLines | TensorBoard)}
        return {name: content for name, tracker in files.items() if (content := tracker.waiting())}

    def close(self) -> None:
        """Close every tracker, even if one of them fails; then raise the first failure."""
        failures: list[Exception] = []
        for tracker in self._trackers.values():
            try:
                tracker.close()
            except Exception as error:
                failures.append(error)
        self._trackers.clear()
        if failures:
            raise failures[0]


def open_trackers(
    names: tuple[str, ...],
    run_dir: str | Path,
    start_step: int = 0,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
    waiting: Mapping[str, bytes] = MappingProxyType({}),
) -> Trackers:
    """Open the trackers with these names (keys of `TRACKERS`) for the run in `run_dir`.

    Args:
      names: keys of `TRACKERS`.
      run_dir: the run directory.
      start_step: number of completed steps that the run resumes from; later values are dropped.
      settings: the run's configuration, for trackers that show it.
      say: called with warnings.
      waiting: what `Trackers.waiting` returned at `start_step`.

    Raises:
      ConfigError: a tracker's package is not installed. Trackers opened before it are closed.
    """
    opened: dict[str, Tracker] = {}
    try:
        for name, make in TRACKERS.items():
            if name in names:
                opened[name] = make(Path(run_dir), start_step, waiting.get(name, b""), settings or {})
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened, say)


def last_logged(run_dir: Path | None) -> dict[str, Any]:
    """Return the values of the last training line in a run's metrics.jsonl; empty if there is none."""
    return next((values for values in _lines_backwards(run_dir) if "loss" in values), {})


def last_evaluation(run_dir: Path | None, step: int) -> dict[str, Any]:
    """Return the values of the evaluation after `step` steps from a run's metrics.jsonl; empty if there is none."""
    lines = (values for values in _lines_backwards(run_dir) if values.get("step") == step)
    return next((values for values in lines if values.keys() & {"eval_loss", "eval_reward"}), {})


def _lines_backwards(run_dir: Path | None) -> Iterator[dict[str, Any]]:
    try:
        lines = (Path(run_dir or "") / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):  # a line that a kill cut off, or of another program
            values = json.loads(line)
            if isinstance(values, dict):
                yield values
