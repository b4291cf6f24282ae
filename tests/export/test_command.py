"""`python -m jaxstack.export`: what it writes, and one message with exit code 2 for what it cannot do."""

import json
import sys

import pytest

from jaxstack.export import __main__ as command
from jaxstack.export import onnx_target
from jaxstack.export.targets import TARGETS
from tests.word_models import FIXTURES, make_word_model


def refused(capsys, *arguments: str) -> str:
    """The message of a command that fails as wrongly used."""
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error, error
    return error


def test_wrong_uses_are_said_before_the_model_is_read(tmp_path, capsys):
    run = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert "did you mean 'onnx'" in refused(capsys, *run, "--to", "onx")
    assert "'bfloat16'" in refused(capsys, *run, "--to", "web", "--dtype", "bfloat16")
    assert "none" in refused(capsys, *run, "--to", "onnx", "--serve", "0")
    assert "--context" in refused(capsys, *run, "--to", "onnx", "--context", "1")
    assert "at most 16,777,216; found 1,000,000,000,000" in refused(
        capsys, *run, "--to", "onnx", "--context", "1" + "0" * 12
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert "exists already" in refused(capsys, *run, "--to", "web")
    (tmp_path / "run-web").touch()
    assert "run-web exists already" in refused(capsys, *run[:2], "--to", "web")


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(onnx_target, "onnx_installed", lambda: False)
    message = refused(capsys, "--run", "x", "--out", str(tmp_path / "out"), "--to", "onnx")
    assert "pip install 'jaxstack[export]'" in message


@pytest.mark.longer
@pytest.mark.parametrize("to", TARGETS)
def test_a_model_that_a_target_cannot_hold_leaves_no_folder(to, tmp_path, capsys):
    source = make_word_model("mixtral", tmp_path / "mixtral")
    message = refused(capsys, "--run", str(source), "--to", to, "--out", str(tmp_path / "out"))
    assert "moe" in message and [path.name for path in tmp_path.iterdir()] == ["mixtral"]


@pytest.mark.longer
def test_a_folder_is_written_and_its_use_is_printed(tmp_path, capsys):
    pytest.importorskip("onnx")
    source = make_word_model("qwen2", tmp_path / "qwen2")
    out = tmp_path / "exports" / "onnx"
    assert command.main(["--run", str(source), "--to", "onnx", "--out", str(out), "--context", "32"]) == 0
    assert f"{out}/run.py" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {"model.onnx", "run.py", "export.json", "tokenizer.json"}
    settings = json.loads((out / "export.json").read_text())
    assert settings["context"] == 32 and settings["stop_tokens"] == [0, 63]
    assert (FIXTURES / "qwen2").is_dir() and "onnx" in sys.modules
