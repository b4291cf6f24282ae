"""`jaxstack compress` as a user runs it: on files and runs, what the result computes, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxstack.generate as generate
from jaxstack import convert
from jaxstack.checkpoint.compressed import dense_parameter, named_leaves, read_compressed
from jaxstack.compress import __main__ as command
from jaxstack.run.evaluate import TextOptions, evaluate
from tests.word_models import as_words, make_word_model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_word_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text(as_words(np.random.default_rng(0).integers(5, 60, 400).tolist()))
    return path


@pytest.fixture(scope="module")
def compressed(source, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    arguments = ["--run", str(source), "--recipe", "int8", "--out", str(out), "--data", str(text)]
    assert command.main([*arguments, "--layer-tokens", "64"]) == 0
    return out


@pytest.mark.exhaustive
@pytest.mark.longer
def test_the_report_has_bytes_and_losses_before_and_after(compressed, text):
    record = json.loads((compressed / "compression.json").read_text())
    assert 1.8 < record["bytes_before"] / record["bytes_after"] < 2.0
    before = record["loss_before"]["loss"]
    after = record["loss_after"]["loss"]
    assert abs(after - before) < 0.02
    layers = {row["layer"] for row in record["rows"]}
    assert set(record["loss_by_layer"]) == {"none", *layers}
    assert all(row["error"] < 1e-3 and row["method"] == "rtn" for row in record["rows"])
    assert "<svg" in (compressed / "report.html").read_text()
    measured = evaluate(compressed, text=TextOptions([str(text)]))
    assert measured.text is not None and math.isclose(measured.text.loss, after, rel_tol=1e-6)


@pytest.fixture(scope="module")
def unpacked(compressed, tmp_path_factory) -> Path:
    """The compressed model converted to Hugging Face files."""
    files = tmp_path_factory.mktemp("files") / "unpacked"
    assert convert.main([str(compressed), "--output", str(files)]) == 0
    return files


@pytest.mark.longer
def test_greedy_text_is_that_of_the_unpacked_weights(compressed, unpacked, capsys):
    texts = []
    for directory in (compressed, unpacked):
        said = ["--prompt", as_words([5, 6, 7]), "--temperature", "0", "--max-tokens", "12", "parallel.data=1"]
        capsys.readouterr()
        assert generate.main(["--run", str(directory), *said]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0].split()) > 3


@pytest.mark.longer
def test_converted_files_hold_the_unpacked_weights(compressed, unpacked):
    tensors = load_file(unpacked / "model.safetensors")
    leaves = named_leaves(read_compressed(compressed)[0])
    path = "decoder/layers/1/mlp/down_proj/kernel"
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], dense_parameter(path, leaves[path]).T)
    table = dense_parameter("embedding/table", leaves["embedding/table"])
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], table)


@pytest.mark.longer
def test_mistakes_are_one_message_with_exit_code_2(source, compressed, tmp_path, capsys):
    def fails(run: Path, recipe: str, out: Path, message: str) -> None:
        capsys.readouterr()
        assert command.main(["--run", str(run), "--recipe", recipe, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error

    new = tmp_path / "new"
    fails(source, "int9", new, "did you mean 'int8'")
    fails(source, "int8", compressed, "exists already")
    fails(compressed, "int8", new, "is compressed already")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("layers:\n  - {path: '.*', method: rtn, bits: 4, group_size: 7}\n")
    fails(source, str(wrong), new, "group_size 7 does not divide")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("model: {preset: tiny, vocab_size: 64}\n")
    fails(empty, "int8", new, "holds no checkpoint yet")
    fails(source, "int8", wrong / "new", "Not a directory")
    assert not new.exists()
    named = source.with_name(f"{source.name}-int8")
    named.mkdir()
    (named / "notes").write_text("of somebody\n")
    assert command.main(["--run", str(source), "--recipe", "int8"]) == 2
    assert f"{named}" in capsys.readouterr().err
