"""The processes of a study: outcomes, pruning, resuming after a kill, several workers, the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.run_config import load_config
from jaxstack.tune import search
from jaxstack.tune.optuna_study import OptunaStudy, TrialRecord
from jaxstack.tune.search import run_study
from tests.tune.studies import write_config, write_study

TRIAL = """
import json, os, pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
text = (directory / "config.yaml").read_text()
rate = float(text.split("learning_rate: ")[1].split(",")[0].split("}")[0].split()[0])
(directory / "checkpoints").mkdir(exist_ok=True)
{body}
"""
LOSSES = """
lines = [json.dumps({"step": step, "eval_loss": abs(rate - 0.03) + 1 / step}) for step in (5, 10, 15, 20)]
(directory / "metrics.jsonl").write_text("\\n".join(lines))
outcome = {"state": "complete", "metrics": {"eval_loss": abs(rate - 0.03) + 0.05}, "memory_excess": -0.5}
"""
END = "(directory / 'outcome.json').write_text(json.dumps(outcome))"
RATES = {"optimizer.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}}


@pytest.fixture
def trials(monkeypatch):
    """Makes the trials short programs; returns a function that sets their body."""

    def use(body: str) -> None:
        command = [sys.executable, "-S", "-c", TRIAL.replace("{body}", body)]
        monkeypatch.setattr(search, "trial_command", lambda directory: [*command, str(directory)])

    monkeypatch.setattr(search, "_POLL_SECONDS", 0.01)
    return use


def run(folder: Path, *overrides: str, said: list[str] | None = None, **keys):
    keys = {"space": RATES, "pruner": "none", **keys}
    study = write_study(folder, **keys)
    return run_study(write_config(folder), study, overrides, report=(said if said is not None else []).append)


def test_a_name_on_the_command_line_is_the_studys(tmp_path, trials):
    trials(LOSSES + END)
    result = run(tmp_path, "run.name=mine", trials=1)
    assert result.directory == tmp_path / "runs" / "mine" and result.best is not None
    assert load_config(result.directory / "best.yaml").run.name == "mine-best"


@pytest.mark.longer
def test_a_study_runs_all_trials_and_writes_the_best_configuration(tmp_path, trials):
    trials(LOSSES + END)
    said: list[str] = []
    result = run(tmp_path, "train.global_batch_size=8", trials=5, workers=2, said=said)
    assert [record.state for record in result.records] == ["complete"] * 5
    best = result.best
    assert best is not None and best.value == min(record.value for record in result.records)
    config = load_config(result.directory / "best.yaml")
    assert config.optimizer.learning_rate == pytest.approx(best.values["optimizer.learning_rate"])
    assert (config.run.name, config.train.global_batch_size) == ("study-best", 8)
    kept = [path.parent.name for path in result.directory.glob("trials/*/checkpoints")]
    assert kept == [f"{best.number:04d}"], "the best trial's checkpoints only"
    page = (result.directory / "report.html").read_text()
    assert f"{best.value:.4f}" in page and "study-best" in page and page.count("<figure") == 3
    assert said[0].endswith("5 trials") and sum("the best so far" in line for line in said) >= 1
    again = run(tmp_path, "train.global_batch_size=8", trials=5)
    assert [r.value for r in again.records] == [r.value for r in result.records], "nothing is left to do"
    assert len(run(tmp_path, "train.global_batch_size=8", trials=6).records) == 6
    with pytest.raises(ConfigError, match="another configuration: configuration.train.global_batch_size was 8, is 4"):
        run(tmp_path)
    with pytest.raises(ConfigError, match="another configuration: space"):
        run(tmp_path, "train.global_batch_size=8", space={"optimizer.learning_rate": [0.1, 0.2]})


@pytest.mark.longer
def test_bad_trials_are_pruned_and_killed(tmp_path, trials):
    body = LOSSES.replace("(5, 10, 15, 20)", "(5, 10)") + "if rate < 0.03: time.sleep(60)\n" + END
    trials(body)
    began = time.monotonic()
    space = {"optimizer.learning_rate": [0.03, 0.04, 0.0299, 0.001]}
    result = run(tmp_path, space=space, pruner="median", pruner_startup_trials=1, trials=8, sampler="random", seed=3)
    states = {record.values["optimizer.learning_rate"]: record.state for record in result.records}
    assert states[0.001] == "pruned" and states[0.03] == "complete"
    assert time.monotonic() - began < 30
    assert not list(result.directory.glob("trials/*/checkpoints")) or result.best is not None


@pytest.mark.longer
def test_outcomes_of_trials_that_do_not_complete(tmp_path, trials):
    trials(
        LOSSES
        + "number = int(directory.name)\n"
        + "if number == 1: outcome = {'state': 'memory', 'reason': 'too large', 'memory_excess': 0.5}\n"
        + "if number == 2: sys.exit(7)\n"
        + "if number == 3: os.kill(os.getpid(), 9)\n"
        + "if number == 4: outcome['metrics'] = {}\n"
        + "if number == 5: outcome['metrics'] = {'eval_loss': float('nan')}\n"
        + END
    )
    records = run(tmp_path, trials=6).records
    assert [record.state for record in records] == ["complete", "memory", "failed", "memory", "failed", "failed"]
    assert records[1].reason == "too large" and "code 7" in records[2].reason and "signal 9" in records[3].reason
    assert "no held-out text" in records[4].reason and "not finite" in records[5].reason


SILENT = """
if number == 1:
    record = {"phase": "train", "step": 7, "beat": 9, "at": time.monotonic(), "step_limit": 0.3}
    pathlib.Path(os.environ["JAXSTACK_PROGRESS_FILE"]).write_text(json.dumps(record))
    time.sleep(100)
"""


@pytest.mark.longer
def test_a_trial_that_hangs_is_told_and_ended(tmp_path, trials, monkeypatch):
    """As in a reader that waits for a file system: it would hold its GPUs and the study for ever."""
    trials(LOSSES + "number = int(directory.name)\n" + SILENT + END)
    said: list[str] = []
    records = run(tmp_path, trials=3, said=said).records
    assert [record.state for record in records] == ["complete", "failed", "complete"]
    expected = (
        "no sign of life for 0 s in phase 'train' at step 7 (limit 0 s; if it only needs longer, raise resilience."
    )
    assert expected in records[1].reason and any("trial 1 is stuck; its stacks:" in line for line in said)


@pytest.mark.longer
def test_values_that_do_not_fit_together_need_no_process(tmp_path, trials):
    trials(LOSSES + END)
    space = {"model.num_heads": [2, 4], "model.num_kv_heads": [1, 4]}
    states = {tuple(record.values.values()): record.state for record in run(tmp_path, space=space, trials=12).records}
    assert states[(2, 4)] == "configuration" and states[(4, 4)] == "complete"


@pytest.mark.longer
@pytest.mark.parametrize("another_host", [False, True])
def test_a_study_whose_first_trials_all_fail_ends(tmp_path, trials, monkeypatch, another_host):
    """Also while another host runs a trial of it, which may take days."""
    trials("outcome = {'state': 'failed', 'reason': 'no such file'}\n" + END)
    if another_host:
        records = OptunaStudy.records
        theirs = TrialRecord(99, "running", {}, None, (), "", None)
        monkeypatch.setattr(OptunaStudy, "records", lambda study: [*records(study), theirs])
    with pytest.raises(JaxstackError, match="all of the first 3 trials failed; the last one: no such file"):
        run(tmp_path, trials=9)


@pytest.mark.longer
def test_trials_see_their_share_of_the_gpus(tmp_path, trials, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("JAX_PLATFORMS", "")  # where it is cpu, the GPUs are left alone
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    seen = "[os.environ['CUDA_VISIBLE_DEVICES'], 'SLURM_STEP_NUM_TASKS' in os.environ]"
    trials(f"{LOSSES}(directory / 'seen').write_text(str({seen}))\ntime.sleep(0.3)\n{END}")
    directory = run(tmp_path, trials=2, workers=2).directory
    assert {path.read_text() for path in directory.glob("trials/*/seen")} == {"['4,5', False]", "['6,7', False]"}
    with pytest.raises(ConfigError, match="must divide the 4 GPUs"):
        run(tmp_path, workers=3, name="other")


def small_text(folder: Path) -> None:
    """Texts of this repository, as small files."""
    (folder / "texts").mkdir()
    source = (Path(search.__file__)).read_text() + Path(__file__).read_text()
    for index, start in enumerate(range(0, len(source), 500)):
        (folder / "texts" / f"{index}.txt").write_text(source[start : start + 500])


def command(folder: Path, *arguments: str) -> list[str]:
    data = f"data.sources=[{{path: {folder / 'texts'}}}]"
    others = ["data.tokenizer.name=byte", f"data.cache_dir={folder / 'tokens'}", "data.held_out_fraction=0.3"]
    return [sys.executable, "-m", "jaxstack.tune", "--config", *arguments, data, *others]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.exhaustive
def test_a_killed_study_goes_on(tmp_path):
    """Real trials: after SIGKILL of the command its trial is gone too, and the same command resumes it."""
    small_text(tmp_path)
    config = write_config(tmp_path, checkpoint={"every_steps": 5}, observe={"log_every": 1})
    study = write_study(tmp_path, space=RATES, trials=2)
    words = command(tmp_path, str(config), "--study", str(study))
    first = subprocess.Popen([*words, "train.steps=100000"], env=environment(tmp_path), stdout=subprocess.DEVNULL)
    trial = tmp_path / "runs" / "study" / "trials" / "0000"
    deadline = time.monotonic() + 200
    while not list(trial.glob("checkpoints/[0-9]*")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    second = subprocess.Popen([*words, "train.steps=100000"], env=environment(tmp_path), text=True, **pipes)
    log = trial / "log.txt"
    while "resuming from step" not in log.read_text():
        assert time.monotonic() < deadline and second.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    second.send_signal(signal.SIGTERM)
    output, errors = second.communicate(timeout=100)
    assert second.returncode == 143, errors
    assert "trial 0: going on" in output and "the same command goes on with the study" in errors
    assert "stopped by SIGTERM" in log.read_text(), "the trial saved"


@pytest.mark.exhaustive
def test_the_quick_start_of_the_documentation(tmp_path):
    """The commands of docs/tuning.md, with fewer and shorter trials."""
    small_text(tmp_path)
    root = Path(search.__file__).parents[2]
    keys = yaml.safe_load((root / "configs" / "studies" / "quickstart.yaml").read_text())
    study = tmp_path / "quickstart.yaml"
    study.write_text(yaml.safe_dump({**keys, "trials": 3, "workers": 1}))
    config = str(root / "configs" / "quickstart.yaml")
    less = ["model.hidden_size=32", "model.num_layers=1", "train.sequence_length=32", f"run.dir={tmp_path}"]
    less += ["train.steps=40", "train.eval_every_steps=10"]
    words = [*command(tmp_path, config, "--study", str(study)), *less]
    found = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, found.stderr
    assert "best: trial" in found.stdout and f"--config {tmp_path}/quickstart/best.yaml" in found.stdout
    config = load_config(tmp_path / "quickstart" / "best.yaml")
    assert config.run.name == "quickstart-best" and config.train.steps == 40
    outcome = json.loads((tmp_path / "quickstart" / "trials" / "0000" / "outcome.json").read_text())
    assert outcome["state"] == "complete" and outcome["memory_excess"] < 0
