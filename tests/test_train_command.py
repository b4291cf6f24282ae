"""The commands as a user runs them: exit codes, one message, and nothing heavy before it is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxstack import __version__
from jaxstack.__main__ import COMMANDS as CLI_COMMANDS
from jaxstack.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[1]


def run(*arguments: str, timeout: int = 120) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=REPOSITORY, env=environment
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "small.yaml"
    path.write_text("model: {preset: tiny}\ntrain: {steps: 5}\n")
    return path


COMMANDS = ["train", "tune", "generate", "evaluate", "convert", "prepare", "checkpoint", "schema"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_and_imports_no_jax(command):
    code = (
        "import runpy, sys, atexit\n"
        "heavy = {'jax', 'flax', 'numpy', 'orbax', 'pydantic'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
        f"sys.argv = ['jaxstack.{command}', '--help']\n"
        f"runpy.run_module('jaxstack.{command}', run_name='__main__', alter_sys=True)\n"
    )
    usage = os.times()
    found = run("-c", code)
    after = os.times()
    assert found.returncode == 0, found.stderr
    assert "usage:" in found.stdout and "HEAVY []" in found.stdout
    seconds = after.children_user + after.children_system - usage.children_user - usage.children_system
    assert seconds < 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.stps=3"], "did you mean 'steps'"),
        (["parallel.data=3", "train.global_batch_size=9", "parallel.simulate_devices=2"], "nearest: data=2"),
        (["model.num_heads=3"], "num_heads"),
        (["nonsense"], "section.key=value"),
        (["data.sources=[{path: /nowhere/at/all.txt}]"], "/nowhere/at/all.txt"),
        (
            ["model.vocab_size=100", "data.tokenizer.name=byte", "data.sources=[{path: jaxstack/loop.py}]"],
            "model.vocab_size (100)",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_configuration_is_one_message_and_exit_code_2(config, arguments, said, tmp_path):
    found = run(
        "-m",
        "jaxstack.train",
        "--config",
        str(config),
        f"run.dir={tmp_path}",
        f"data.cache_dir={tmp_path}/c",
        *arguments,
    )
    assert found.returncode == 2, found.stderr
    assert said in found.stderr and "Traceback" not in found.stderr
    (message,) = [line for line in found.stderr.splitlines() if not re.fullmatch(r"[a-z ]+: \d+ s", line)]
    assert message.startswith("jaxstack train: ")  # on a busy machine after lines of what it does


def test_a_wrong_configuration_is_found_before_jax_is_imported(config):
    code = (
        "import sys\nfrom jaxstack.train import main\n"
        f"code = main(['--config', {str(config)!r}, 'train.steps=x'])\n"
        "import jax\nfrom jax._src import xla_bridge\nprint(code, xla_bridge.backends_are_initialized())\n"
    )
    found = run("-c", code)
    assert found.stdout.split() == ["2", "False"], found.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["--config"], ["--config", "nowhere.yaml"], ["--confg", "x"], ["train.steps=1"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments):
    found = run("-m", "jaxstack.train", *arguments)
    assert found.returncode == 2 and "Traceback" not in found.stderr and found.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("train", [], "--config is missing. For example: python -m jaxstack.train --config"),
        ("train", ["--conifg", "a.yaml"], "there is no option --conifg; did you mean '--config'"),
        ("train", ["--version"], "there is no option --version. For example:"),
        ("plan", [], "--config is missing. For example: python -m jaxstack.plan"),
        ("generate", ["def "], "--run is missing (the text to continue is --prompt). For example:"),
        ("generate", ["--run", "x", "--max-tokens", "x"], "invalid int value: 'x'. For example:"),
        ("evaluate", ["--runs=x"], "there is no option --runs=x; did you mean '--run'?"),
        ("convert", [], "SOURCE, --output. For example: python -m jaxstack.convert"),
        ("checkpoint", ["runs/a"], "invalid choice: 'runs/a'"),
    ],
)
def test_wrong_usage_is_one_line_with_a_command_that_is_right(command, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        CLI_COMMANDS[command].load().main(arguments)
    text = capsys.readouterr().err
    assert ended.value.code == 2 and said in text and len(text.splitlines()) == 1
    assert text.startswith(f"jaxstack {command}: ") and f"all options: jaxstack {command} --help" in text


@pytest.mark.quick
def test_the_file_and_the_run_may_stand_without_their_option(config, tmp_path, capsys):
    assert main(["train", str(config), "--print-config", "train.steps=9"]) == 0
    assert "steps: 9" in capsys.readouterr().out
    assert main(["train", "train.steps=9", str(config), "--print-config"]) == 0
    assert main(["train", "nowhere.yaml"]) == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err
    assert main(["generate", str(tmp_path)]) == main(["evaluate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("neither a run directory") == 2


@pytest.mark.quick
def test_words_that_are_no_subcommand(capsys):
    assert main(["-V"]) == main(["version"]) == main(["help"]) == 0
    assert capsys.readouterr().out.count("jaxstack 0") == 2
    with pytest.raises(SystemExit):
        main(["help", "plan"])
    assert "usage: jaxstack plan" in capsys.readouterr().out
    assert main(["my.yaml"]) == main(["TRAIN"]) == main(["launch", "my.yaml", "train.steps=5"]) == 2
    text = capsys.readouterr().err
    assert "jaxstack train --config my.yaml\n" in text and "did you mean 'train'?" in text
    assert "jaxstack launch -- python -m jaxstack.train --config my.yaml train.steps=5\n" in text


def test_overrides_may_stand_before_and_after_options(config):
    found = run("-m", "jaxstack.train", "train.steps=7", "--config", str(config), "--print-config", "run.name=b")
    assert found.returncode == 0 and "steps: 7" in found.stdout and "name: b" in found.stdout


def test_print_config_reloads_to_the_same(config, tmp_path):
    first = run("-m", "jaxstack.train", "--config", str(config), "--print-config", "optimizer.learning_rate=1e-5")
    again = tmp_path / "again.yaml"
    again.write_text(first.stdout)
    second = run("-m", "jaxstack.train", "--config", str(again), "--print-config")
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout
    assert "name: small" in first.stdout


def test_the_console_command_knows_its_subcommands():
    found = run("-m", "jaxstack", "--help")
    assert found.returncode == 0 and all(command in found.stdout for command in COMMANDS)
    wrong = run("-m", "jaxstack", "trian")
    assert wrong.returncode == 2 and "did you mean 'train'" in wrong.stderr
    assert run("-m", "jaxstack").returncode == 2
    assert run("-m", "jaxstack", "--version").stdout == f"jaxstack {__version__}\n"
    for command in COMMANDS:
        assert run("-m", "jaxstack", command, "--help").returncode == 0, command


def test_library_names_are_there():
    code = (
        "from jaxstack import Trainer, load_config\n"
        "from jaxstack.models import Transformer, ModelConfig\n"
        "from jaxstack.parallel import make_mesh, logical_axis_rules, shard\n"
        "from pallas_kernels import flash_attention, linear_cross_entropy, rms_norm\n"
    )
    found = run("-c", code)
    assert found.returncode == 0, found.stderr
