"""Compressed models written for vLLM and read again, as a user does it: convert, generate, evaluate, compress."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxstack.evaluate as evaluate
import jaxstack.generate as generate
from jaxstack import convert
from jaxstack.checkpoint.compressed import named_leaves, read_compressed
from jaxstack.compress import __main__ as compress
from pallas_kernels import PackedWeight
from tests.word_models import as_words, make_word_model

FIXTURES = Path(__file__).parents[1] / "models" / "huggingface" / "compressed_tensors"
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized", "int4-zeros": "pack-quantized"}


def called(main, *arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.mark.longer
@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_the_library_come_back_bit_by_bit(kind, tmp_path):
    called(convert.main, FIXTURES / kind, "--output", tmp_path / "run")
    arguments = ("--dtype", "bfloat16", "--format", FORMATS[kind])
    called(convert.main, tmp_path / "run", "--output", tmp_path / "back", *arguments)
    expected = raw_tensors(FIXTURES / kind)
    found = raw_tensors(tmp_path / "back")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value, name
    said = {part: read_groups(part / "config.json") for part in (FIXTURES / kind, tmp_path / "back")}
    assert said[FIXTURES / kind] == said[tmp_path / "back"]


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """The dtype and the bytes of every tensor."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    entries.pop("__metadata__", None)
    return {
        name: (entry["dtype"], content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in entries.items()
    }


def read_groups(path: Path) -> dict[str, object]:
    """What vLLM reads of a configuration: formats, targets and settings that are not None."""
    said = json.loads(path.read_text())["quantization_config"]
    group = said["config_groups"]["group_0"]
    settings = {
        part: {key: value for key, value in (group[part] or {}).items() if value is not None and key != "observer"}
        for part in ("weights", "input_activations")
    }
    return {"format": said["format"], "ignore": said["ignore"], "targets": group["targets"], **settings}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text(as_words(np.random.default_rng(0).integers(5, 60, 400).tolist()))
    return path


RECIPES = {
    "pack-quantized": "[{path: /v_proj/, method: rtn, bits: 8}, {path: mlp/down, method: keep},"
    " {path: ^decoder/, method: rtn, bits: 4, group_size: 16}, {path: table, method: rtn}]",
    "float-quantized": "[{path: ^decoder/, method: fp8, activations: fp8}]",
    "int-quantized": "[{path: ^decoder/, method: rtn, activations: int8}]",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "mixtral"])
def test_a_compressed_model_survives_the_round_trip(family, format, tmp_path):
    source = make_word_model(family, tmp_path / "source")
    (tmp_path / "recipe.yaml").write_text(f"layers: {RECIPES[format]}")
    ours = tmp_path / "ours"
    files = tmp_path / "files"
    again = tmp_path / "again"
    called(compress.main, "--run", source, "--recipe", tmp_path / "recipe.yaml", "--out", ours)
    called(convert.main, ours, "--output", files, "--format", format)
    called(convert.main, files, "--output", again)
    before, after = (named_leaves(read_compressed(directory)[0]) for directory in (ours, again))
    for path, leaf in before.items():
        other = after[path]
        if not isinstance(leaf, PackedWeight):
            np.testing.assert_array_equal(leaf, other, err_msg=path)
        elif path.endswith("/table"):  # written dense
            np.testing.assert_array_equal(leaf.matrix(), other)
        else:
            assert leaf.format == other.format and (leaf.inputs, leaf.outputs) == (other.inputs, other.outputs)
            for name, array in leaf.arrays.items():
                assert np.asarray(array).tobytes() == np.asarray(other.arrays[name]).tobytes(), f"{path}:{name}"
    said = json.loads((files / "config.json").read_text())["quantization_config"]
    routers = [name for name in raw_tensors(files) if name.endswith(".gate.weight")]
    assert set(said["ignore"]) >= {name.removesuffix(".weight") for name in routers}


@pytest.mark.exhaustive
def test_a_quantized_checkpoint_is_evaluated_and_compressed(text, tmp_path, capsys):
    source = make_word_model("qwen2", tmp_path / "qwen2")
    called(compress.main, "--run", source, "--recipe", "fp8", "--out", tmp_path / "fp8")
    called(convert.main, tmp_path / "fp8", "--output", tmp_path / "files", "--format", "float-quantized")
    called(convert.main, tmp_path / "fp8", "--output", tmp_path / "dense")
    said = []
    texts = []
    for directory in ("files", "dense"):
        capsys.readouterr()
        called(generate.main, "--run", tmp_path / directory, "--prompt", as_words([5, 6, 7]), "--temperature", 0,
               "--max-tokens", 8, "parallel.data=1")  # fmt: skip
        texts.append(capsys.readouterr().out)
        called(evaluate.main, "--run", tmp_path / directory, "--data", text, "--json")
        said.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1] and len(texts[0].split()) > 3
    losses = [result["eval_loss"] for result in said]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.01), "inputs are rounded too"
    called(compress.main, "--run", tmp_path / "files", "--recipe", "int8", "--out", tmp_path / "int8", "--data", text)
    record = json.loads((tmp_path / "int8" / "compression.json").read_text())
    assert record["loss_before"]["loss"] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.longer
@pytest.mark.quick
def test_formats_that_do_not_fit_are_one_message(tmp_path, capsys):
    called(convert.main, FIXTURES / "int4", "--output", tmp_path / "run")

    def fails(*arguments: object) -> str:
        capsys.readouterr()
        assert convert.main([str(argument) for argument in (*arguments, "--output", tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    assert "not in FP8. Choose --format pack-quantized." in fails(tmp_path / "run", "--format", "float-quantized")
    assert "no integers of 8 bits" in fails(tmp_path / "run", "--format", "int-quantized")
    assert "did you mean 'pack-quantized'" in fails(tmp_path / "run", "--format", "packed-quantized")
    assert not (tmp_path / "out").exists()
