"""Calibration layer by layer: what is measured, on which inputs, and what becomes of the weights."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.after_training.calibrate import LayerRunner, dense_layers, layers_in_order
from jaxstack.compress.after_training.layerwise import compress_layers
from jaxstack.compress.base import AfterTraining
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.compress.solvers.awq import Awq
from jaxstack.compress.solvers.gptq import Gptq
from jaxstack.compress.solvers.sparsegpt import SparseGpt
from jaxstack.compress.solvers.wanda import Wanda
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.stack import Stack
from pallas_kernels.weight_only.packed import PackedWeight

pytestmark = pytest.mark.longer  # a few seconds each

DENSE = tuple(f"attention/{name}_proj" for name in "qkvo") + tuple(f"mlp/{n}_proj" for n in ("gate", "up", "down"))
SHAPE: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}


def _model(layers: int = 2, **changes: Any) -> Transformer:
    return Transformer(ModelConfig(**{**SHAPE, "num_layers": layers, "scan_layers": False, **changes}), nnx.Rngs(0))


def _batches(count: int = 2, **arrays: np.ndarray) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"tokens": random.integers(0, 32, (3, 8)).astype(np.int32), **arrays} for _ in range(count)]


def _methods(method: AfterTraining, layers: range = range(2), head: bool = False) -> dict[str, AfterTraining]:
    names = [f"decoder/layers/{n}/{path}/kernel" for n in layers for path in DENSE]
    return dict.fromkeys([*names, "head"] if head else names, method)


def _put(model: Transformer, weights: Mapping[str, Any]) -> Transformer:
    """Return a copy of the unrolled model with the changed weights as plain arrays."""
    graphdef, state = nnx.split(model)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        new = weights.get("/".join(map(str, path)))
        new = new.dense() if isinstance(new, PackedWeight) else new
        flat.append((path, variable if new is None else variable.replace(new)))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def test_statistics_are_those_of_the_inputs():
    model = _model(1)
    batches = _batches()
    runner = LayerRunner(jnp.float32)
    streams = runner.embed(model, batches)
    block = model.decoder.layers[0]
    wanted = frozenset({"hessian", "mean_abs", "square_sum"})
    found = runner.measure(block, streams, {"attention/v_proj": wanted, "mlp/gate_proj": frozenset({"mean_abs"})})
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    embedded = np.asarray(model.embedding.table[...])[tokens].reshape(-1, 16)
    x = embedded / np.sqrt(np.square(embedded).mean(1, keepdims=True) + 1e-5)
    statistics = found["attention/v_proj"]
    assert statistics.count == 48
    np.testing.assert_allclose(statistics.hessian, 2 * x.T @ x / 48, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(statistics.mean_abs, np.abs(x).mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics.square_sum, np.square(x).sum(0), rtol=1e-4)
    assert found["mlp/gate_proj"].hessian is None and found["mlp/gate_proj"].mean_abs.shape == (16,)


@pytest.mark.exhaustive
def test_layers_of_a_scan_are_compressed_like_unrolled_ones():
    scanned = _model(3, scan_layers=True)
    unrolled = _model(3)
    for (_, single), (_, row) in zip(layers_in_order(unrolled.decoder), layers_in_order(scanned.decoder), strict=True):
        nnx.update(single, nnx.state(row))
    unrolled.embedding = scanned.embedding
    unrolled.final_norm = scanned.final_norm
    unrolled.head = scanned.head
    methods = _methods(Wanda(path="."), range(3), head=True)
    first, second = (compress_layers(model, _batches(), methods) for model in (scanned, unrolled))
    assert first.weights.keys() == second.weights.keys() == methods.keys()
    for path, pruned in first.weights.items():
        np.testing.assert_array_equal(pruned, second.weights[path])


def test_next_layer_is_calibrated_on_compressed_ones():
    model = _model()
    batches = _batches()
    method = Wanda(path=".", sparsity=0.9)
    whole = compress_layers(model, batches, _methods(method)).weights
    first = {path: w for path, w in whole.items() if "/0/" in path}
    second = compress_layers(_put(model, first), batches, _methods(method, range(1, 2))).weights
    for path, pruned in second.items():
        np.testing.assert_array_equal(pruned, whole[path])
    alone = compress_layers(model, batches, _methods(method, range(1, 2))).weights
    assert any((pruned != whole[path]).any() for path, pruned in alone.items())


@pytest.mark.longer
def test_awq_folds_scales_where_activations_are_large():
    model = _model(1)
    batches = _batches()
    block = model.decoder.layers[0]
    block.attention_norm.scale[...] = block.attention_norm.scale[...].at[:2].set(20.0)
    block.mlp_norm.scale[...] = block.mlp_norm.scale[...].at[3].set(20.0)
    tokens = batches[0]["tokens"]
    exact = np.asarray(model(jnp.asarray(tokens)))

    def error(method: AfterTraining) -> tuple[float, dict[str, Any]]:
        weights = compress_layers(model, batches, _methods(method, range(1))).weights
        logits = np.asarray(_put(model, weights)(jnp.asarray(tokens)))
        return float(np.square(logits - exact).sum() / np.square(exact).sum()), weights

    found, weights = error(Awq(path=".", bits=3, group_size=16))
    assert found < 0.9 * error(Rtn(path=".", bits=3, group_size=16))[0]
    assert weights["decoder/layers/0/mlp_norm/scale"][3] < 20.0


def test_methods_of_one_layer_may_differ():
    model = _model()
    batches = _batches()
    chosen = _methods(Wanda(path="."), range(1)) | _methods(Wanda(path=".", pattern="2:4"), range(1, 2))
    chosen["decoder/layers/0/attention/q_proj/kernel"] = SparseGpt(path=".")
    chosen["decoder/layers/0/mlp/down_proj/kernel"] = Rtn(path=".", bits=8)
    result = compress_layers(model, batches, chosen)
    assert result.weights.keys() == chosen.keys()
    assert isinstance(result.weights["decoder/layers/0/mlp/down_proj/kernel"], PackedWeight)
    for path, w in result.weights.items():
        if not isinstance(w, PackedWeight):
            assert w.shape == dict(_shapes(model))[path] and float((w == 0).mean()) == pytest.approx(0.5, abs=0.01)
    assert 0 < result.output_errors["decoder/layers/0/attention/q_proj/kernel"] < 0.5
    assert "decoder/layers/1/attention/q_proj/kernel" not in result.output_errors  # Wanda needs no Hessian


def _shapes(model: Transformer) -> list[tuple[str, tuple[int, ...]]]:
    stack: Stack = model.decoder
    return [
        (f"decoder/layers/{number}/{path}/kernel", layer.kernel.shape)
        for number, block in layers_in_order(stack)
        for path, layer in dense_layers(block).items()
    ]


def test_failed_solver_and_unknown_path_are_reported():
    model = _model(1)
    said = []
    model.decoder.layers[0].attention_norm.scale[...] = jnp.full(16, jnp.nan)
    path = "decoder/layers/0/attention/q_proj/kernel"
    compress_layers(model, _batches(1), {path: Gptq(path=".", group_size=16)}, report=said.append)
    assert len(said) == 2 and said[1].startswith(path) and "not positive definite" in said[1]
    with pytest.raises(KeyError, match=r"mlp/nothing.* is no weight that can be compressed"):
        compress_layers(model, _batches(1), {"decoder/layers/0/mlp/nothing/kernel": Rtn(path=".")})


def test_embedding_of_a_tied_model_is_calibrated_as_its_head():
    model = _model(1, tie_word_embeddings=True)
    batches = _batches()
    method = Gptq(path=".", group_size=16)
    path = "embedding/table"
    found = compress_layers(model, batches, {path: method})
    packed = found.weights[path]
    assert isinstance(packed, PackedWeight) and packed.matrix().shape == (32, 16) and found.output_errors[path] < 0.05
    rounded = compress_layers(model, batches, {path: Rtn(path=".", bits=4, group_size=16)}).weights[path]
    assert (packed.arrays["scales"] == rounded.arrays["scales"]).all()
    assert (packed.arrays["q"] != rounded.arrays["q"]).any()
    with pytest.raises(ConfigError, match="token ids.*method: keep"):
        compress_layers(_model(1), batches, {path: method})
