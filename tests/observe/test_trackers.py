"""Trackers: what a resumed run finds, strict JSON, event files that TensorBoard reads, wandb played."""

import json
import math
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxstack.errors import ConfigError
from jaxstack.observe.trackers import TRACKERS, JsonLines, MLflow, TensorBoard, Trackers, WandB, open_trackers
from tests.checkpoint.test_disk_full import fill_up, mounted


def _records(path):
    def refuse(name):
        raise AssertionError(f"{name} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_writes_each_line_at_once(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": 2.5, "mfu": None})
    assert _records(tracker.path) == [{"step": 1, "loss": 2.5, "mfu": None}]  # before it is closed
    tracker.log(2, {"eval_loss": np.float32(1.5), "tokens": np.int64(7)})
    tracker.close()
    assert _records(tracker.path)[1] == {"step": 2, "eval_loss": 1.5, "tokens": 7}


FULL_DISK = """
import resource, sys
from jaxstack.observe.trackers import JsonLines, Trackers
path, said = sys.argv[1], []
trackers = Trackers({"jsonl": JsonLines(path)}, said.append)
trackers.log(1, {"loss": 1.0})
full = (40, resource.RLIM_INFINITY)  # what a disk of 40 bytes would do, and needs no root
resource.setrlimit(resource.RLIMIT_FSIZE, full)
for step in (2, 3, 4):
    trackers.log(step, {"loss": 1.0})
assert open(path).read().count("\\n") == 1 and open(path).read().endswith("\\n"), "no torn line"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trackers.log(5, {"loss": 1.0})
trackers.close()
print(said)
"""


FULL_DISK_OF_EVENTS = """
import os, resource, sys
from jaxstack.observe.trackers import TensorBoard, Trackers
folder, said = sys.argv[1], []
trackers = Trackers({"tensorboard": TensorBoard(folder)}, said.append)
trackers.log(1, {"loss": 1.0})
size = os.path.getsize(os.path.join(folder, *os.listdir(folder)))
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
for step in (2, 3, 4):
    trackers.log(step, {"loss": 1.0})
assert os.path.getsize(os.path.join(folder, *os.listdir(folder))) == size, "no torn record"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trackers.log(5, {"loss": 1.0})
trackers.close()
print(said)
"""


def test_a_full_disk_costs_no_event_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", FULL_DISK_OF_EVENTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("could not be written") == 1 and "of step 2 " in done.stdout
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4, 5]


def test_a_full_disk_is_said_once_and_loses_no_line(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "metrics.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not be written") == 1 and "of step 2 " in done.stdout
    assert [record["step"] for record in _records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def _values(step: int) -> dict[str, float]:
    """More than what is left of the last block of a file."""
    return {"loss": float(step)} | {f"value {number}": 0.0 for number in range(300)}


@pytest.mark.parametrize("room", ["before the restart", "after it", "after the next one"])
def test_what_waits_for_room_is_written_once_by_a_run_that_goes_on(tmp_path, room):
    """Steps 2 and 3 wait when the state of step 3 is kept; step 4 is repeated at each start."""
    names = ("jsonl", "tensorboard")
    with mounted(tmp_path / "disk", "size=256k") as disk:
        run_dir = disk / "run"
        lost = open_trackers(names, run_dir)
        lost.log(1, _values(1))
        fill_up(disk)
        for step in (2, 3):
            lost.log(step, _values(step))
        kept = lost.waiting()
        assert list(kept) == list(names) and kept["jsonl"].count(b"\n") == 2
        if room == "before the restart":
            (disk / "filler").unlink()
        lost.log(4, _values(4))
        if room == "after the next one":
            said = []
            lost = open_trackers(names, run_dir, 3, say=said.append, waiting=kept)
            lost.log(4, _values(4))
            assert len(said) == 2 and [line["step"] for line in _records(run_dir / "metrics.jsonl")] == [1]
            kept = lost.waiting()
        if room != "before the restart":
            (disk / "filler").unlink()
        start = 4 if room == "after the next one" else 3
        last = open_trackers(names, run_dir, start, waiting=kept)
        assert last.waiting() == {}
        for step in range(start + 1, 6):
            last.log(step, _values(step))
        last.close()
        assert [line["step"] for line in _records(run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5]
        assert scalars(run_dir / "tensorboard", "loss") == [(step, float(step)) for step in range(1, 6)]


def test_a_new_run_does_not_begin_on_a_full_disk(tmp_path):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        fill_up(disk)
        with pytest.raises(OSError, match="No space left"):
            TensorBoard(disk)


def test_jsonl_stays_strict_json_when_a_loss_blows_up(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": np.float32(-math.inf)})
    tracker.close()
    (record,) = _records(tracker.path)
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert math.isnan(float(record["a"])) and float(record["c"]) == -math.inf


def test_jsonl_resume_drops_later_lines_and_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 10, "loss": 3.0}\n{"step": 20,   "loss": 2.0}\n{"step": 20, "eval_loss": 2.1}\n'
    path.write_text(kept + '{"step": 30, "loss": 1.0}\n{"step": 40, "los')
    tracker = JsonLines(path, start_step=20)
    assert path.read_text() == kept  # as they stood, byte by byte
    tracker.log(30, {"loss": 1.5})
    tracker.close()
    logged = [(record["step"], record.get("loss")) for record in _records(path)]
    assert logged == [(10, 3.0), (20, 2.0), (20, None), (30, 1.5)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_jsonl_torn_line_of_a_kept_step_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\x00\x00\n[3]\n{"step": 2}')
    JsonLines(path, start_step=5).close()
    assert path.read_text() == '{"step": 1}\n'


def test_jsonl_without_checkpoint_starts_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n')
    JsonLines(path).close()
    assert path.read_text() == ""


def test_jsonl_survives_a_kill(tmp_path):
    """A process that is killed without warning leaves every logged line."""
    path = tmp_path / "metrics.jsonl"
    code = f"""
        import os, signal
        from jaxstack.observe.trackers import JsonLines
        tracker = JsonLines({str(path)!r})
        for step in range(1, 51):
            tracker.log(step, {{"loss": 1 / step}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -9
    assert [record["step"] for record in _records(path)] == list(range(1, 51))


def scalars(directory, tag):
    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    if tag in accumulator.Tags()["scalars"]:
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]


def test_tensorboard_reads_the_values_back(tmp_path):
    tracker = TensorBoard(tmp_path)
    tracker.log(10, {"loss": 2.5, "mfu": None, "note": "text", "tokens": np.int64(4)})
    tracker.log(20, {"loss": np.float32(1.25)})
    tracker.close()
    assert scalars(tmp_path, "loss") == [(10, 2.5), (20, 1.25)]
    assert scalars(tmp_path, "tokens") == [(10, 4.0)]


def test_tensorboard_resume_replaces_later_values(tmp_path):
    first = TensorBoard(tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step)})
    first.close()
    resumed = TensorBoard(tmp_path, start_step=20)
    resumed.log(40, {"loss": 4.0})
    resumed.close()
    assert scalars(tmp_path, "loss") == [(10, 10.0), (20, 20.0), (40, 4.0)]


def test_tensorboard_pulls_in_no_framework(tmp_path):
    code = (
        "import sys; from jaxstack.observe.trackers import TensorBoard; "
        f"t = TensorBoard({str(tmp_path)!r}); t.log(1, {{'a': 1.0}}); t.close(); "
        "print([m for m in ('tensorflow', 'torch', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class _FakeRun:
    def __init__(self):
        self.lines = []
        self.metrics = []
        self.finished = False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.lines.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    calls = []

    def init(**arguments):
        calls.append((arguments, _FakeRun()))
        return calls[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return calls


def test_wandb_resumes_the_same_run(tmp_path, fake_wandb):
    tracker = WandB(tmp_path, name="a", settings={"train": {"steps": 3}})
    tracker.log(5, {"loss": 1.0, "mfu": None})
    tracker.close()
    WandB(tmp_path, start_step=5).close()
    (first, run), (second, _) = fake_wandb
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], first["name"], first["config"]) == ("jaxstack", "a", {"train": {"steps": 3}})
    assert run.lines == [{"step": 5, "loss": 1.0}] and run.finished
    assert ("*", "step") in run.metrics


def test_missing_wandb_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxstack\[wandb\]'"):
        open_trackers(("jsonl", "wandb"), tmp_path)


class _FakeMLflow:
    """mlflow's client, as far as the tracker uses it; what it holds outlives the tracker."""

    experiments = {}
    runs = {}

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return found and types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        self.experiments[name] = "7"
        return "7"

    def create_run(self, experiment, run_name):
        run_id = f"{experiment}-{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "params": {}, "metrics": [], "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_param(self, run_id, key, value):
        self.runs[run_id]["params"][key] = value

    def log_metric(self, run_id, key, value, step):
        assert self.runs[run_id]["status"] == "RUNNING"
        self.runs[run_id]["metrics"].append((step, key, value))

    def set_terminated(self, run_id):
        self.runs[run_id]["status"] = "FINISHED"


def test_mlflow_resumes_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.SimpleNamespace(MlflowClient=_FakeMLflow))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    tracker = MLflow(tmp_path, name="a", settings={"train": {"steps": 3}})
    tracker.log(1, {"loss": np.float32(2.0), "mfu": None, "note": "text", "grad_norm": math.nan})
    tracker.close()
    resumed = MLflow(tmp_path, start_step=1)
    resumed.log(2, {"loss": 1.0})
    resumed.close()
    ((_, run),) = _FakeMLflow.runs.items()
    assert run["metrics"] == [(1, "loss", 2.0), (2, "loss", 1.0)] and run["status"] == "FINISHED"
    assert (run["name"], run["params"]) == ("a", {"train.steps": "3"}) and _FakeMLflow.experiments == {"jaxstack": "7"}


def test_mlflow_without_a_store_says_what_it_needs(tmp_path, monkeypatch):
    """mlflow-skinny, which the extra installs, writes no files."""
    refusal = type("MlflowException", (Exception,), {"__module__": "mlflow.exceptions"})

    def make_client() -> None:
        raise refusal("got unsupported URI 'sqlite:///mlflow.db'.")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.SimpleNamespace(MlflowClient=make_client))
    with pytest.raises(ConfigError, match="unsupported URI .* Set MLFLOW_TRACKING_URI to a server"):
        open_trackers(("jsonl", "mlflow"), tmp_path)


def test_missing_mlflow_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxstack\[mlflow\]'"):
        open_trackers(("jsonl", "mlflow"), tmp_path)


def test_open_trackers_fans_out_in_the_table_order(tmp_path, fake_wandb):
    assert list(TRACKERS) == ["jsonl", "tensorboard", "wandb", "mlflow"]
    trackers = open_trackers(("wandb", "tensorboard", "jsonl"), tmp_path / "run", settings={"a": 1})
    trackers.log(3, {"loss": 0.5})
    trackers.close()
    assert _records(tmp_path / "run" / "metrics.jsonl") == [{"step": 3, "loss": 0.5}]
    assert scalars(tmp_path / "run" / "tensorboard", "loss") == [(3, 0.5)]
    assert fake_wandb[0][1].lines == [{"step": 3, "loss": 0.5}]
    assert fake_wandb[0][0]["name"] == "run"


def test_close_reaches_every_tracker():
    closed = []

    def tracker(name, fails):
        def close():
            closed.append(name)
            if fails:
                raise OSError(name)

        return types.SimpleNamespace(log=lambda step, values: None, close=close)

    with pytest.raises(OSError, match="first"):
        Trackers({"a": tracker("first", True), "b": tracker("second", True), "c": tracker("third", False)}).close()
    assert closed == ["first", "second", "third"]
