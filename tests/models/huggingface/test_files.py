"""Damaged, missing and foreign tensors: one clear message each."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxstack.errors import ConfigError
from jaxstack.models import from_huggingface

HERE = Path(__file__).parent
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(HERE / "llama", tmp_path / "llama"))


def change(folder: Path, **tensors: np.ndarray | None) -> None:
    held = load_file(folder / "model.safetensors")
    held.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
    save_file({k: v for k, v in held.items() if tensors.get(k, v) is not None}, folder / "model.safetensors")


def message(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        from_huggingface(folder)
    return str(error.value)


def test_missing_strange_and_misshapen_tensors_are_named_together(folder):
    change(folder, **{NORM: None, "model.strange": np.zeros(3, np.float32)})
    change(folder, **{"model.layers.0.self_attn.k_proj.weight": np.zeros((32, 32), np.float32)})
    said = message(folder)
    assert "1 tensors are missing: model.norm.weight" in said
    assert "1 tensors are not known: model.strange" in said
    assert "model.layers.0.self_attn.k_proj.weight is [32, 32], not [16, 32]" in said


def test_integers_are_refused_as_quantized(folder):
    change(folder, **{NORM: np.ones(32, np.int8)})
    assert "model.norm.weight is I8: quantized" in message(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [(lambda b: b[:-100], "damaged"), (lambda b: b"not safetensors", "damaged"), (lambda b: b"", "damaged")],
    ids=["cut off", "another format", "empty"],
)
def test_damaged_files_are_named(folder, content, named):
    file = folder / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    assert named in message(folder) and "model.safetensors" in message(folder)


def test_weights_that_were_not_fetched(folder):
    file = folder / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n")
    assert "model.safetensors is a pointer of Git LFS" in message(folder)
    file.unlink()
    file.symlink_to(folder / "blobs" / "0123")
    assert "model.safetensors is a link to " in message(folder)


def test_config_that_is_missing_or_no_json(folder):
    (folder / "config.json").write_text("{")
    assert "is not JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "must hold a JSON object" in message(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in message(folder)


def test_weights_that_are_missing(folder):
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in message(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    assert "no weight_map" in message(folder)
    index.write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    assert "model-1.safetensors is missing" in message(folder)
    index.write_text(json.dumps({"weight_map": {NORM: "../other/model.safetensors"}}))
    assert "outside" in message(folder)
    save_file({"a": np.zeros(1, np.float32)}, folder / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    assert f"lacks tensors that model.safetensors.index.json places there: {NORM}" in message(folder)


def test_a_head_beside_a_tied_embedding_must_be_it(folder):
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": table.copy()})
    from_huggingface(folder)
    change(folder, **{"lm_head.weight": table * table.dtype.type(2)})
    assert "tie_word_embeddings is true" in message(folder)


def test_old_buffers_and_names_without_prefix_are_read(tmp_path):
    folder = Path(shutil.copytree(HERE / "gpt2", tmp_path / "gpt2"))
    held = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in held.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    save_file(bare, folder / "model.safetensors")
    found = from_huggingface(folder)
    expected = from_huggingface(HERE / "gpt2")
    np.testing.assert_array_equal(found.embedding.table[...], expected.embedding.table[...])
    np.testing.assert_array_equal(
        found.decoder.layers[0].attention.k_proj.kernel[...], expected.decoder.layers[0].attention.k_proj.kernel[...]
    )
