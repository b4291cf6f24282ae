"""`jaxstack evaluate` on Hugging Face checkpoints and runs: the loss, on any mesh, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxstack.evaluate as evaluate
import jaxstack.generate as generate
from jaxstack.data.config import DataConfig, SourceConfig
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models import from_huggingface
from jaxstack.run.evaluate import TextOptions, _open_text, _source_of
from jaxstack.run.load import check_finite
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from tests.marks import longer
from tests.word_models import as_words, make_word_model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_word_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[Path, list[int]]:
    ids = np.random.default_rng(0).integers(1, 64, 50).tolist()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(as_words(ids))
    return path, ids


def run(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert evaluate.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.longer
@pytest.mark.parametrize("layout", [["parallel.data=1"], *longer(["parallel.fsdp=4", "parallel.tensor=2"])], ids=str)
def test_the_loss_of_a_checkpoint_is_that_of_its_logits(source, text, layout, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, ids = text
    values = run(capsys, "--run", str(source), "--data", str(path), *layout)
    logits = from_huggingface(source)(jnp.array([[0, *ids]], jnp.int32))[0]
    losses = -jax.nn.log_softmax(logits[:-1])[np.arange(len(ids)), ids]
    assert values["eval_items"] == len(ids)
    assert values["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert evaluate.main([*arguments]) == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith(("tokenizing", "held out"))]
    assert len(lines) == 1 and "Traceback" not in said, said
    return lines[0]


@pytest.mark.quick
def test_a_run_whose_data_is_elsewhere_is_told_to_take_other_text(tmp_path):
    """As for a run that was copied from another machine."""
    config = RunConfig(data=DataConfig(sources=(SourceConfig(path=str(tmp_path / "gone.txt")),)))
    with pytest.raises(ConfigError, match=r"text cannot be read here: .*; or give other text with --data\."):
        _open_text(config, tmp_path, TextOptions(), print)


def test_wrong_use_gets_one_message(source, text, tmp_path, capsys, monkeypatch):
    run = ["--run", str(source)]
    assert "give --data or --tasks" in refused(capsys, *run)
    assert "neither a run directory" in refused(capsys, "--run", str(tmp_path))
    assert "--limit must be at least 1" in refused(capsys, *run, "--tasks", "x", "--limit", "0")
    assert "found train" in refused(capsys, "train.steps=3", *run, "--tasks", "x")
    more = make_word_model("llama", tmp_path / "more", words=80)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "the tokenizer has 80 ids" in refused(capsys, "--run", str(more), "--data", str(text[0]), "parallel.data=1")
    for name in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jaxstack.decoding.harness", raising=False)
    monkeypatch.delattr("jaxstack.decoding.harness", raising=False)
    assert "pip install 'jaxstack[eval]'" in refused(capsys, *run, "--tasks", "hellaswag")


def test_a_file_of_chats_is_read_as_chats(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": as_words([1, 2]), "completion": as_words([3, 4, 5])}) + "\n")
    assert _source_of(str(chats), "text").format == "chat"
    assert _source_of(str(chats), "completion").format == "auto"
    (tmp_path / "texts.jsonl").write_text('{"text": "w1"}\n')
    assert _source_of(str(tmp_path / "texts.jsonl"), "text").format == "auto"
    line = refused(capsys, "--run", str(source), "--data", str(chats))
    assert "set format" not in line and "template" in line


@pytest.mark.longer
def test_the_length_of_rows_is_said(source, text, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert evaluate.main(["--run", str(source), "--data", str(text[0]), "parallel.data=1"]) == 0
    assert ", in rows of " in capsys.readouterr().out
    assert run(capsys, "--run", str(source), "--data", str(text[0]), "parallel.data=1")["row_length"] > 0


@pytest.mark.quick
def test_weights_that_are_no_numbers_are_named(source):
    params = {"norm": np.ones(3, np.float32), "kernel": np.array([1, np.inf], np.float32), "bias": np.array([np.nan])}
    with pytest.raises(JaxstackError, match=r"2 of 3 hold NaN or infinity, the first is bias\."):
        check_finite(params, StoredModel.open(source))


@pytest.mark.longer
def test_commands_refuse_weights_that_are_no_numbers(source, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = shutil.copytree(source, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("1.mlp.down_proj.weight"))
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for command, more in ((evaluate, ["--data", str(text[0])]), (generate, ["--prompt", "w1", "--max-tokens", "2"])):
        assert command.main(["--run", str(broken), *more, "parallel.data=1"]) == 1
        said = capsys.readouterr().err
        assert "1 of " in said and "mlp/down_proj/kernel" in said and "hold NaN or infinity" in said
