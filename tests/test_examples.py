"""The examples of the documentation run, and show what they say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.longer
def test_attention_in_somebodys_linen_model():
    assert load("attention_in_linen").main() < 1e-5


@pytest.mark.longer
def test_fp8_in_somebodys_models():
    found = load("fp8_in_flax").main()
    assert found["nnx"] < 0.2 and found["nnx in FP8"] == pytest.approx(found["nnx"], rel=0.1)
    assert 0.001 < found["relative error of a Linen layer"] < 0.1  # rounded, though not far away


def test_mesh_and_rules_around_somebodys_module():
    layout, first, last = load("mesh_and_rules").main()
    assert "fsdp" in layout and "tensor" in layout
    assert last < 0.2 * first


@pytest.mark.exhaustive
def test_trainer_on_a_vision_transformer_and_an_lstm():
    found = load("trainer_vit_and_lstm").main()
    assert found["vision Transformer"] < 0.3  # ln 4 = 1.39 is chance
    assert found["LSTM"] < 0.3  # the variance of the sums is 12 x 0.09 = 1.08


@pytest.mark.longer
def test_checkpoints_and_data_alone():
    assert load("checkpoints_and_data").main()


@pytest.mark.exhaustive
@pytest.mark.longer
def test_embedding_of_a_language_model_in_host_memory():
    assert load("host_embedding").main()


def test_every_example_is_tested_and_shown():
    tested = Path(__file__).read_text(encoding="utf-8")
    page = (FOLDER.parent / "examples.md").read_text(encoding="utf-8")
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) == 6
    for name in names:
        assert f'load("{name}")' in tested and f"<!-- source: examples/{name}.py -->" in page, name
