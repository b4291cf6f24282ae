"""Commands of two processes, which compute with the devices of both, beside those of one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxstack.errors import ConfigError
from jaxstack.run import setting
from jaxstack.run_config import load_config
from tests.word_models import as_words, make_word_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint, and a text in its words."""
    place = tmp_path_factory.mktemp("processes")
    make_word_model("llama", place / "llama")
    (place / "text.txt").write_text(as_words([*range(1, 60)] * 8))
    return place


def run(folder: Path, processes: int, *command: str) -> str:
    """Run a command of jaxstack on four devices; return what it prints on standard output."""
    launch = ["-m", "jaxstack.launch", "--processes", str(processes), "--max-restarts", "0", "--", sys.executable]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": str(4 // processes),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), "-m", *command],
        capture_output=True, text=True, env=environment, cwd=folder, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # The launcher marks the lines of the second process, which has some signs of life until the two have met. Several
    # threads at once write lines like "[Gloo] ... : 3", so that the number may stand on a line of its own, or
    # before an object.
    lines = (line for line in done.stdout.splitlines() if "Gloo" not in line and not line.strip().isdecimal())
    return "\n".join(re.sub(r"^\d+(?={)", "", line) for line in lines if line and not line.startswith("[1]"))


LAYOUTS = [
    pytest.param((), marks=pytest.mark.longer),
    pytest.param(("parallel.tensor=2", "parallel.data=2"), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_processes_measure_the_loss_of_one(folder, layout):
    command = ("jaxstack.evaluate", "--run", "llama", "--data", "text.txt", "--json", *layout)
    one, two = (json.loads(run(folder, count, *command)) for count in (1, 2))
    assert one["eval_items"] == two["eval_items"] > 400
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)


@pytest.mark.exhaustive
def test_two_processes_measure_the_loss_of_a_compressed_model(folder):
    """Each with rows of its own, where one process has it on one device."""
    run(folder, 1, "jaxstack.compress", "--run", "llama", "--recipe", "int8", "--out", "packed")
    command = ("jaxstack.evaluate", "--run", "packed", "--data", "text.txt", "--json")
    one, two = (json.loads(run(folder, count, *command)) for count in (1, 2))
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)


@pytest.mark.longer
def test_a_layout_without_devices_of_a_process_is_told(monkeypatch):
    config = load_config(None, ["model.preset=tiny", "parallel.data=2"])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(setting, "check_same_memory", lambda *_: None)
    for purpose in ("evaluate", "decode"):
        with pytest.raises(ConfigError, match=r"a layout on 2 of 8 devices leaves 1 of 2 processes without any; give"):
            setting.Setting.of(config, purpose, chosen=True)


@pytest.mark.exhaustive
def test_two_processes_generate_the_text_of_one(folder):
    """Only the first prints it."""
    command = ("jaxstack.generate", "--run", "llama", "--prompt", as_words([3, 4]), "--json", "--max-tokens", "8")
    one, two = (run(folder, count, *command, "--samples", "4") for count in (1, 2))
    assert one == two and len(one.splitlines()) == 4


@pytest.mark.exhaustive
def test_one_of_two_processes_converts(folder):
    said = run(folder, 2, "jaxstack.convert", "llama", "--output", "converted")
    assert said == run(folder, 1, "jaxstack.convert", "llama", "--output", "again").replace("again", "converted")
    assert (folder / "converted" / "config.yaml").is_file()
