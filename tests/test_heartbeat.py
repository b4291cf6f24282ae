"""Lines of commands that print nothing for some seconds."""

import sys
import time

import pytest

from jaxstack import heartbeat
from jaxstack.cli import run_command
from jaxstack.heartbeat import doing, silence


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat, "SECONDS", 0.1)


@pytest.mark.longer
def test_silent_work_is_named_and_what_prints_or_waits_is_not(capsys):
    def body() -> None:
        time.sleep(0.35)
        with doing("searching"):
            time.sleep(0.35)
            with doing(None):
                time.sleep(0.5)
            for number in range(25):
                print(number, file=sys.stdout if number % 2 else sys.stderr)
                time.sleep(0.02)
        silence()
        time.sleep(0.3)

    streams = sys.stdout, sys.stderr
    assert run_command("jaxstack plan", body) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if not line.isdecimal()]
    assert said[0] == "working: 0 s" and said[-1] == "searching: 0 s" and set(said) == {said[0], said[-1]}
    assert 2 <= said.count(said[0]) <= 3 and 2 <= said.count(said[-1]) <= 4
    time.sleep(0.3)
    assert not capsys.readouterr().err and (sys.stdout, sys.stderr) == streams


def test_library_functions_outside_of_a_command_print_nothing(capsys):
    with doing("evaluating"):
        time.sleep(0.3)
    assert not any(capsys.readouterr())


def test_an_error_ends_the_lines(capsys):
    def body() -> None:
        raise ValueError("wrong")

    assert run_command("jaxstack plan", body) == 1
    capsys.readouterr()
    time.sleep(0.3)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "place", "said"),
    [
        (["compress", "--run", "RUN", "--recipe", "int8"], "jaxstack.compress.after_training.run.compress", "working"),
        (["evaluate", "--run", "tests"], "jaxstack.run.evaluate.evaluate", "evaluating"),
        (["generate", "--run", "tests", "--prompt", "a"], "jaxstack.run.load.load", "loading the model"),
        (
            ["serve", "--run", "tests/models/huggingface/gpt-oss", "--port", "0"],
            "jaxstack.run.load.load",
            "loading the model",
        ),
        (["export", "--run", "R", "--to", "stablehlo"], "jaxstack.export.source.load_source", "loading the model"),
        (["train", "--config", "configs/quickstart.yaml"], "jaxstack.run.train.train", "working"),
    ],
)
def test_every_command_that_works_for_long_says_what_it_does(arguments, place, said, capsys, monkeypatch):
    from jaxstack.__main__ import main
    from jaxstack.errors import JaxstackError

    def slow(*_: object, **__: object) -> None:
        time.sleep(0.3)
        raise JaxstackError("ends here")

    if arguments[0] == "serve":
        pytest.importorskip("uvicorn")
    monkeypatch.setattr(place, slow)
    assert main(arguments) == 1
    assert f"{said}: 0 s" in capsys.readouterr().err.splitlines()
