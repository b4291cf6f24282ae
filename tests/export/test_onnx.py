"""ONNX graphs in ONNX Runtime: the logits of transformers, in one call, with a cache, and in rows of unequal length."""

import numpy as np
import pytest

from jaxstack.export import onnx_target
from jaxstack.export.onnx_target import build_graph
from jaxstack.export.run_exported import OnnxModel, generate
from tests.export.sources import DENSE, MIXTURES, PROMPT, expected, make_source

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", [pytest.param(DENSE[0], marks=pytest.mark.quick), *DENSE[1:]])
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    source = make_source(name)
    wanted = expected(name)
    assert onnx_target.problem(source) is None
    onnx_target.write(source, tmp_path)
    model = OnnxModel(tmp_path)
    tokens = wanted["tokens"]
    np.testing.assert_allclose(model.start([row[:5] for row in tokens]), wanted["logits"][:, 4], atol=1e-4, rtol=0)
    for position in range(5, 24):
        found = model.advance(tokens[:, position])
        np.testing.assert_allclose(found, wanted["logits"][:, position], atol=1e-4, rtol=0)
    found = model.start([tokens[0, :3], tokens[1, :20]])
    np.testing.assert_allclose(found, wanted["logits"][[0, 1], [2, 19]], atol=1e-4, rtol=0)
    greedy = [int(ids[0]) for ids in generate(model, [tokens[0, :PROMPT]], 12, source.generation())]
    assert greedy == wanted["greedy"].tolist()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_refused(name):
    assert "moe" in (onnx_target.problem(make_source(name)) or "")


def test_large_weights_are_written_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_target, "_EXTERNAL_BYTES", 0)
    wanted = expected("gpt2")
    onnx_target.write(make_source("gpt2"), tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size / 2
    found = OnnxModel(tmp_path).start([wanted["tokens"][0]])
    np.testing.assert_allclose(found[0], wanted["logits"][0, -1], atol=1e-4, rtol=0)


def test_the_head_can_be_left_to_the_last_token(tmp_path):
    import onnxruntime

    source = make_source("qwen3")
    wanted = expected("qwen3")
    build_graph(source.model, source.parameters, last_only=True).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    empty = np.zeros((2, source.model.kv_heads, 0, source.model.width_per_head), np.float32)
    tokens = wanted["tokens"].astype(np.int64)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    feeds = {"input_ids": tokens, "position_ids": positions, "attention_mask": np.ones_like(tokens)}
    feeds |= {one.name: empty for one in session.get_inputs() if one.name.startswith("past")}
    (found,) = session.run(["logits"], feeds)
    np.testing.assert_allclose(found, wanted["logits"][:, -1:], atol=1e-4, rtol=0)
