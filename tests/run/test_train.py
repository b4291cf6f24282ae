"""`python -m jaxstack.train` in processes of its own: killed, stopped, taken up again; then text from the run."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxstack.train as train
from jaxstack.run.train import Task
from jaxstack.run_config import load_config
from tests.heartbeats import without_heartbeats

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 60
CONFIG = f"""
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, intermediate_size: 64, dropout: 0.1}}
data: {{tokenizer: {{name: byte}}, held_out_fraction: 0.1}}
train: {{steps: {STEPS}, global_batch_size: 8, sequence_length: 64}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every_steps: 5}}
observe: {{log_every: 1, trackers: [jsonl]}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    source = "".join((REPOSITORY / "jaxstack" / name).read_text() for name in ("loop.py", "step.py", "trainer.py"))
    texts = folder / "texts"
    texts.mkdir()
    for index, start in enumerate(range(0, len(source), 700)):
        (texts / f"{index}.txt").write_text(source[start : start + 700])
    (folder / "small.yaml").write_text(CONFIG + f"run: {{dir: {folder}}}\n")
    return folder


def environment(folder: Path) -> dict[str, str]:
    # One compilation cache for all processes.
    return {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen:
    sources = f"data.sources=[{{path: {folder / 'texts'}}}]"
    cache = f"data.cache_dir={folder / 'tokens'}"
    command = [sys.executable, "-m", "jaxstack.train", "--config", str(folder / "small.yaml"), f"run.name={name}"]
    return subprocess.Popen(
        [*command, sources, cache, *overrides],
        cwd=REPOSITORY, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, without_heartbeats(err)


def losses_of(run: Path) -> dict[int, float]:
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "loss" in values:
            assert values["step"] not in found, "no step stands twice"
            found[values["step"]] = values["loss"]
    return found


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run ended before step {step}: {process.communicate()}")


@pytest.fixture(scope="module")
def unbroken(folder) -> Path:
    code, out, err = finish(start(folder, "unbroken"))
    assert code == 0, err
    assert "gzip -9" in out and "bits per byte" in out, "the end compares with compressors"
    assert "jaxstack.generate --run" in out and "\x1b[" not in out + err, "no colours outside of a terminal"
    return folder / "unbroken"


def test_an_unbroken_run_learns_and_leaves_everything(unbroken):
    losses = losses_of(unbroken)
    assert sorted(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1] - 1
    for name in ("config.yaml", "metrics.jsonl", "environment.json", "report.html", "checkpoints", "tokenizer"):
        assert (unbroken / name).exists(), name
    last = json.loads((unbroken / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"eval_loss", "eval_perplexity", "eval_bits_per_byte"} <= set(last)


@pytest.mark.exhaustive
def test_killed_at_a_random_moment_and_taken_up_again(folder, unbroken):
    name = "killed"
    for low, high in ((2, 20), (25, STEPS - 5)):
        process = start(folder, name)
        wait_for_step(process, folder / name, random.randint(low, high))
        process.kill()
        assert finish(process)[0] == -signal.SIGKILL
    code, out, err = finish(start(folder, name))
    assert code == 0, err
    assert "resuming from step" in out
    assert losses_of(folder / name) == losses_of(unbroken)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.exhaustive
def test_a_signal_saves_first(folder, unbroken, number, code):
    name = number.name
    process = start(folder, name, "checkpoint.every_steps=1000")
    wait_for_step(process, folder / name, 7)
    process.send_signal(number)
    found, _, err = finish(process)
    assert found == code and "Traceback" not in err
    kept = [int(path.name) for path in (folder / name / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(kept) == 1 and 7 <= kept[0] < STEPS
    assert f"checkpoint {kept[0]}" in err
    report = (folder / name / "report.html").read_text()
    assert f"The run was stopped after step {kept[0]}; the newest checkpoint is of step {kept[0]}." in report
    if number == signal.SIGTERM:
        code, out, err = finish(start(folder, name, "checkpoint.every_steps=1000"))
        assert code == 0 and f"resuming from step {kept[0]}" in out
        assert losses_of(folder / name) == losses_of(unbroken)


@pytest.mark.exhaustive
def test_goes_on_when_the_reader_of_its_output_goes_away(folder, unbroken):
    """`train ... | head -1` reads one line; the run finishes all the same."""
    process = start(folder, "piped")
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=300) == 0, err
    assert err.count("nobody reads standard output any more") == 1 and "Traceback" not in err
    assert losses_of(folder / "piped") == losses_of(unbroken)
    assert (folder / "piped" / "report.html").exists()


@pytest.mark.exhaustive
def test_taken_up_on_another_layout(folder, unbroken):
    """Twenty steps on one device, the rest on eight simulated ones."""
    name = "moved"
    process = start(folder, name, "model.dropout=0")
    wait_for_step(process, folder / name, 21)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    layout = ("parallel.simulate_devices=8", "parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2")
    code, out, err = finish(start(folder, name, "model.dropout=0", *layout))
    assert code == 0 and "resuming from step" in out, err
    whole = finish(start(folder, "stayed", "model.dropout=0"))
    assert whole[0] == 0
    found = losses_of(folder / name)
    wanted = losses_of(folder / "stayed")
    assert [found[s] for s in range(1, 31)] == pytest.approx([wanted[s] for s in range(1, 31)], rel=1e-4)
    assert found[STEPS] == pytest.approx(wanted[STEPS], rel=1e-2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.seed=1", "seed"),
        ("train.global_batch_size=16", "global_batch_size"),
        ("model.hidden_size=64", "does not fit this run"),
    ],
)
def test_a_run_is_not_gone_on_with_as_another(folder, unbroken, override, said):
    before = (unbroken / "config.yaml").read_text()
    code, _, err = finish(start(folder, "unbroken", override, f"train.steps={STEPS + 5}"))
    assert code in (1, 2) and "Traceback" not in err
    assert said in err and (len(err.strip().splitlines()) == 1 or "model" in override)
    assert (unbroken / "config.yaml").read_text() == before, "the finished run's own configuration is left as it was"


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxstack.generate", *arguments],
        cwd=REPOSITORY, env=environment(folder), capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.exhaustive
def test_generated_text_is_the_same_for_the_same_seed(folder, unbroken):
    arguments = ("--run", str(unbroken), "--prompt", "def ", "--max-tokens", "40", "--top-k", "20", "--seed")
    first, again, other = (generate(folder, *arguments, seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def ") and len(first.stdout) > 10
    assert first.stdout == again.stdout != other.stdout
    assert re.search(rf"step {STEPS}\b", first.stderr)


@pytest.mark.exhaustive
def test_several_samples_and_an_older_checkpoint(folder, unbroken):
    steps = sorted(int(p.name) for p in (unbroken / "checkpoints").iterdir() if p.name.isdigit())
    found = generate(folder, "--run", str(unbroken), "--samples", "3", "--max-tokens", "5", "--step", str(steps[0]))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("--- sample") == 3 and f"step {steps[0]}" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--run", "nowhere"), "neither a run directory"),
        (("--run", "RUN", "--temperature", "-1"), "temperature"),
        (("--run", "RUN", "--top-p", "2"), "top_p"),
        (("--run", "RUN", "--top-k", "0"), "top_k"),
        (("--run", "RUN", "--max-tokens", "0"), "--max-tokens"),
        (("--run", "RUN", "--step", "3"), "no checkpoint of step 3"),
        (("--run", "RUN", "parallel.tensor=3"), "tensor"),
        ((), "--run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_use_of_generate_is_exit_code_2(folder, unbroken, arguments, said):
    found = generate(folder, *(str(unbroken) if a == "RUN" else a for a in arguments))
    assert found.returncode == 2, found.stderr
    assert said in found.stderr and "Traceback" not in found.stderr


def test_the_command_at_the_end_can_be_copied_whatever_the_directory_is_called(tmp_path):
    lines: list[str] = []
    config = load_config(None, [f"run.dir={tmp_path}/my runs", "run.name=a"])
    Task().summarize(config, {}, lines.append)
    words = shlex.split(lines[-1])
    assert words[words.index("--run") + 1] == f"{tmp_path}/my runs/a"


def test_the_configuration_of_a_renamed_run_does_not_start_another(tmp_path, capsys):
    """It would begin anew under the old name, in silence."""
    folder = tmp_path / "new"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{name: old, dir: {tmp_path}}}\n")
    command = ["--config", str(folder / "config.yaml"), "data.sources=[{path: /nowhere}]", "parallel.data=-1"]
    assert train.main(command) == 2
    said = capsys.readouterr().err
    assert f"add run.dir={tmp_path} run.name=new" in said and said.count("\n") == 1
    for name in ("new", "other"):
        assert train.main([*command, f"run.name={name}"]) == 2
        assert "/nowhere" in capsys.readouterr().err
