"""Every benchmark's command line: help that explains, one message for what is wrong, no traceback."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import steps
from benchmarks.arguments import positive
from jaxstack.errors import ConfigError

BENCHMARKS = Path(steps.__file__).parent
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS).with_suffix("").as_posix()
    for path in BENCHMARKS.rglob("*.py")
    if path.parent.name != "peers" and "\ndef main()" in path.read_text(encoding="utf-8")
)
"""Paths below the folder of the benchmarks, without those of the peers, which need other packages."""


def run(name: str, monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", [f"{Path(name).name}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name.replace('/', '.')}").main()
    return ended.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_it_measures_and_how_to_call_it(name, monkeypatch, capsys):
    added: list[argparse.Action] = []
    add = argparse.ArgumentParser.add_argument
    monkeypatch.setattr(
        argparse.ArgumentParser, "add_argument", lambda *a, **k: (added.append(found := add(*a, **k)), found)[1]
    )
    assert run(name, monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert f"python benchmarks/{name}.py" in text or name == "steps", "a command to copy"
    assert [action.dest for action in added if not action.help and action.choices is None] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_option_is_one_message(name, monkeypatch, capsys):
    assert run(name, monkeypatch, "--no-such-option") == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith(f"{Path(name).name}.py: error: ")


def test_what_cannot_be_measured_is_one_message_and_a_failure(monkeypatch, capsys):
    def refuse():
        raise ConfigError("model.num_layers must be at least 1")

    with pytest.raises(SystemExit) as ended:
        steps.run_as_command("steps.py", refuse)
    assert ended.value.code == 2 and capsys.readouterr().err == "steps.py: model.num_layers must be at least 1\n"
    monkeypatch.setattr("benchmarks.training.train_step.run_worker", lambda *a: None)
    assert run("training/train_step", monkeypatch, "gpt2-124m bf16", "--tiny", "--peers") == 1


@pytest.mark.parametrize(("text", "said"), [("0", "above 0; found 0"), ("-1.5", "above 0"), ("nan", "above 0")])
def test_numbers_have_to_be_above_zero(text, said):
    assert positive(float)("2.5") == 2.5
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        positive(float)(text)


def test_a_tiny_work_keeps_its_layout():
    from benchmarks.training.train_step import WORKS

    small = steps.tiny(WORKS["llama3-8b context4 65536 bf16"])
    assert "parallel.context=4" in small and small[-1] == "parallel.simulate_devices=4"
