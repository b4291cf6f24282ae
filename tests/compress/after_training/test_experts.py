"""Compression of the experts of a mixture: what each is calibrated on, and what becomes of its weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.after_training.calibrate import LayerRunner, weights_by_path
from jaxstack.compress.after_training.layerwise import LayerwiseResult, compress_layers
from jaxstack.compress.base import AfterTraining, stack_compressed
from jaxstack.compress.config import METHODS, Recipe, choose_methods
from jaxstack.compress.formats.sparse import Pattern
from jaxstack.compress.matrix import compressible_weights, layer_kernels
from jaxstack.compress.solvers.awq import Awq
from jaxstack.compress.solvers.gptq import gptq
from jaxstack.config.loader import build_component
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.parallel.config import ParallelConfig
from pallas_kernels import Grid, PackedWeight

pytestmark = pytest.mark.longer  # a few seconds each

EXPERTS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "num_layers": 1, "scan_layers": False,
}  # fmt: skip
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALL = frozenset({"hessian", "mean_abs", "square_sum"})


def _model(moe: Mapping[str, Any] = MOE, **changes: Any) -> Transformer:
    config = build_component(ModelConfig, {**SHAPE, "moe": moe, **changes}, "model")
    model = Transformer(config, nnx.Rngs(0))
    model.decoder.layers[0].mlp_norm.scale[...] = jnp.linspace(0.5, 2.0, config.hidden_size)
    return model


def _batches(count: int = 2) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [{"tokens": random.integers(0, 32, (4, 6)).astype(np.int32)} for _ in range(count)]


def _compress(model: Transformer, expert_tokens: int = 0, **rule: Any) -> tuple[LayerwiseResult, list[str]]:
    recipe = build_component(Recipe, {"layers": [{"path": "mlp/(up|gate|down)_proj", **rule}]}, "recipe")
    lines: list[str] = []
    methods = choose_methods(recipe, compressible_weights(model.config))
    return compress_layers(model, _batches(), methods, expert_tokens=expert_tokens, report=lines.append), lines


def _put(model: Transformer, weights: Mapping[str, Any]) -> Transformer:
    graphdef, state = nnx.split(model)
    named = [("/".join(map(str, path)), path, variable) for path, variable in nnx.to_flat_state(state)]
    flat = [(path, variable.replace(weights[name]) if name in weights else variable) for name, path, variable in named]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _dense(weights: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {path: w.dense() if isinstance(w, PackedWeight) else w for path, w in weights.items()}


def _logits(model: Transformer) -> np.ndarray:
    found = model(_batches(1)[0]["tokens"])
    return np.asarray(found[0] if isinstance(found, tuple) else found)


def _inputs_by_hand(model: Transformer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inputs [tokens, D] of the mixture, the chosen experts [tokens, k], and their weights."""
    found = []
    block = model.decoder.layers[0]
    for batch in _batches():
        x, context = model.inputs_of_layers(jnp.asarray(batch["tokens"]))
        attended = x + block.attention(block.attention_norm(x), context, None)[0]
        found.append(np.asarray(block.mlp_norm(attended)).reshape(-1, 16))
    x = np.concatenate(found)
    scores = jax.nn.softmax(x @ np.asarray(block.mlp.router.kernel[...]), axis=-1)
    weights, chosen = jax.lax.top_k(scores, 2)
    return x, np.asarray(chosen), np.asarray(weights / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize("fewest", [0, 1000])
def test_statistics_are_those_of_the_tokens_that_an_expert_gets(fewest):
    model = _model()
    runner = LayerRunner(jnp.float32)
    streams = runner.embed(model, _batches())
    block = model.decoder.layers[0]
    found = runner.measure_experts(block, streams, "mlp", {"up_proj": ALL, "down_proj": ALL}, fewest)
    x, chosen, weights = _inputs_by_hand(model)
    gate, up = (np.asarray(getattr(block.mlp, name).kernel[...]) for name in ("gate_proj", "up_proj"))
    assert found.counts == [int((chosen == expert).sum()) for expert in range(EXPERTS)] and min(found.counts) > 0
    assert found.rare == (list(range(EXPERTS)) if fewest else [])
    for expert in range(EXPERTS):
        token, place = np.nonzero(chosen == expert)
        own = x if fewest else x[token]
        weight = 1.0 if fewest else weights[token, place, None]
        inner = np.asarray(jax.nn.silu(own @ gate[expert])) * (own @ up[expert]) * weight
        for name, rows in (("up_proj", own), ("down_proj", inner)):
            statistics = found.statistics[name][expert]
            assert statistics.count == len(rows)
            np.testing.assert_allclose(statistics.hessian, 2 * rows.T @ rows / len(rows), rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(statistics.mean_abs, np.abs(rows).mean(0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(statistics.square_sum, np.square(rows).sum(0), rtol=1e-3, atol=1e-5)


def test_each_expert_is_solved_with_its_own_inputs():
    model = _model()
    found, lines = _compress(model, method="gptq", bits=3, group_size=16)
    x, chosen, _ = _inputs_by_hand(model)
    packed = found.weights["decoder/layers/0/mlp/up_proj/kernel"]
    assert isinstance(packed, PackedWeight) and packed.stack == (EXPERTS,) and packed.shape == (EXPERTS, 16, 32)
    kernel = model.decoder.layers[0].mlp.up_proj.kernel[...]
    for expert in range(EXPERTS):
        rows = x[(chosen == expert).any(-1)]
        alone = gptq(kernel[expert].T, jnp.asarray(2 * rows.T @ rows / len(rows)), Grid(3, 16))
        different = np.mean(np.asarray(alone.q) != np.asarray(packed.arrays["q"][expert]))
        assert different < 0.02  # of two Hessians that differ by rounding
    assert sum(found.expert_tokens["decoder/layers/0/mlp"]) == 2 * 48
    assert any(
        line.startswith("decoder/layers/0/mlp: ") and "tokens an expert, 24 in the mean" in line for line in lines
    )


def test_experts_with_few_tokens_are_named():
    counts = _compress(_model(), method="wanda")[0].expert_tokens["decoder/layers/0/mlp"]
    least = ", ".join(f"{expert} ({count})" for expert, count in enumerate(counts) if count == min(counts))
    _, lines = _compress(_model(), expert_tokens=min(counts) + 1, method="wanda")
    said = [line for line in lines if "calibrated on all tokens instead" in line]
    assert len(said) == 1 and said[0].endswith(f"experts {least}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_changes_the_outputs_of_experts_less_than_rounding(bits):
    model = _model(num_layers=2)
    plain = _logits(model)
    errors = {}
    for method in ("rtn", "gptq"):
        found, _ = _compress(model, method=method, bits=bits, group_size=16)
        errors[method] = np.linalg.norm(_logits(_put(model, _dense(found.weights))) - plain)
    assert errors["gptq"] < errors["rtn"]


RULES = [
    {"method": "rtn", "bits": 4, "group_size": 16},
    {"method": "fp8"},
    {"method": "bfp", "block_size": 16},
    {"method": "kmeans", "iterations": 5},
    {"method": "mxfp4"},
    {"method": "nf4"},
    {"method": "lowrank"},
    {"method": "bct", "tile_size": 16},
    {"method": "gptq", "bits": 4, "group_size": 16},
    {"method": "awq", "bits": 4, "group_size": 16},
    {"method": "bct_gptq", "tile_size": 16},
    {"method": "magnitude", "pattern": "2:4"},
    {"method": "wanda"},
    {"method": "sparsegpt", "pattern": "2:4"},
]


def test_the_rules_are_those_of_every_method():
    methods = {method.model_fields["method"].default for method in METHODS if issubclass(method, AfterTraining)}
    assert {rule["method"] for rule in RULES} == methods


def test_experts_with_two_of_four_sparsity_are_plain_arrays():
    """No kernel multiplies with a stack of packed ones."""
    w = jax.random.normal(jax.random.key(0), (2, 8, 16))
    pattern = Pattern(keep_of=(2, 4))
    stacked = stack_compressed([pattern.pack(one) for one in w])
    np.testing.assert_array_equal(stacked, jnp.stack([pattern.prune(one, jnp.abs(one)) for one in w]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["method"])
@pytest.mark.parametrize("moe", [{}, {"n_shared_experts": 1, "shared_expert_gate": True}], ids=["plain", "shared"])
def test_every_method_takes_experts_and_computes_with_them_packed(rule, moe):
    wide = rule["method"] in ("mxfp4", "nf4")  # their blocks have 32 and 64 inputs
    sizes = {"hidden_size": 64, "intermediate_size": 64} if wide else {}
    model = _model({**MOE, **moe, **({"moe_intermediate_size": 64} if wide else {})}, **sizes)
    found, _ = _compress(model, **rule)
    packed = _put(model, found.weights)
    np.testing.assert_allclose(_logits(packed), _logits(_put(model, _dense(found.weights))), atol=2e-6)
    names = {"up_proj", "gate_proj", "down_proj"}
    assert {path.split("/")[-2] for path, w in found.weights.items() if w.ndim == 3 and "mlp/" in path} >= names


@pytest.mark.parametrize(
    "moe",
    [
        pytest.param({"n_shared_experts": 1, "shared_expert_gate": True}, id="shared"),
        pytest.param({"swiglu_limit": 7.0, "expert_bias": True, "router_bias": True}, id="gpt-oss"),
    ],
)
def test_scales_of_awq_leave_the_function_unchanged(moe):
    model = _model({**MOE, **moe})
    block = model.decoder.layers[0]
    runner = LayerRunner(jnp.float32)
    streams = runner.embed(model, _batches())
    layouts = {path: layout for path, layout in layer_kernels(block).items() if path.startswith("mlp/")}
    needs = {name: ALL for name in ("up_proj", "gate_proj", "down_proj")}
    measured = runner.measure_experts(block, streams, "mlp", needs).statistics
    statistics: dict[str, Any] = {f"mlp/{name}/kernel": each for name, each in measured.items()}
    dense = {path.removesuffix("/kernel"): ALL for path, layout in layouts.items() if not layout.stack}
    statistics |= {f"{path}/kernel": one for path, one in runner.measure(block, streams, dense).items()}
    rule = Awq(path="mlp", bits=2, group_size=16)
    methods = dict.fromkeys(layouts, rule)
    replaced = rule.rescaled_weights(runner.calibration_block(model, block, streams, layouts, statistics, methods))
    assert {"mlp_norm/scale", "mlp/router/kernel"} <= replaced.keys()
    assert ("mlp/shared_gate/kernel" in replaced) == ("shared_expert_gate" in moe)
    before = weights_by_path(nnx.split(block)[1])
    changed = max(float(jnp.max(jnp.abs(new - before[path]))) for path, new in replaced.items())
    assert changed > 0.01
    new = _put(model, {f"decoder/layers/0/{path}": value for path, value in replaced.items()})
    np.testing.assert_allclose(_logits(new), _logits(model), atol=1e-5)


@pytest.mark.exhaustive
def test_experts_on_several_devices_are_calibrated_like_those_on_one():
    model = _model()
    single = LayerRunner(jnp.float32)
    needs = {"up_proj": ALL, "down_proj": ALL}
    alone = single.measure_experts(model.decoder.layers[0], single.embed(model, _batches()), "mlp", needs)
    layout = ParallelConfig(expert=2, data=1)
    rules = make_rules(make_mesh(layout, jax.devices()[:2]))
    several = LayerRunner(jnp.float32, rules)
    streams = several.embed(model, _batches())
    found = several.measure_experts(model.decoder.layers[0], streams, "mlp", needs)
    assert found.counts == alone.counts
    for name, each in alone.statistics.items():
        for one, other in zip(each, found.statistics[name], strict=True):
            np.testing.assert_allclose(one.hessian, other.hessian, rtol=1e-3, atol=1e-5)
