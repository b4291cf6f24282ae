"""LoRA and DoRA: what the adapted layers compute, how they merge, and which parameters they train in every layout."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.cost_model.model_shape import adapter_share, model_shape
from jaxstack.errors import ConfigError
from jaxstack.models import (
    AdapterRule,
    ModelConfig,
    Transformer,
    add_adapters,
    count_parameters,
    flops_saved_per_token,
    merge_adapters,
)
from jaxstack.models.adapters import Adapter, AdapterConfig, adapted_layers
from jaxstack.models.linear import Linear
from jaxstack.models.moe.router import MoEConfig
from jaxstack.models.moe_layer import MoE
from jaxstack.module_arrays.adapters import Adapters
from jaxstack.parameter_paths import path_name
from jaxstack.run.train import _describe
from tests.small_runs import make_trainer, run_steps, small_config

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, qkv_bias=True)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
RULES = (
    AdapterRule(path="attention/[qv]_proj", rank=4, alpha=8),
    AdapterRule(path="o_proj|down_proj", method="dora", rank=3),
)


def moved(model: Transformer) -> Transformer:
    """With adapters that change something."""
    random = np.random.default_rng(1)
    for layer in adapted_layers(model).values():
        adapter = layer.adapter
        adapter.b[...] = jnp.asarray(random.normal(0, 0.1, adapter.b.shape), jnp.float32)
        if adapter.magnitude is not None:
            adapter.magnitude[...] *= jnp.asarray(random.uniform(0.5, 2, adapter.magnitude.shape), jnp.float32)
    return model


def model_of(config: ModelConfig = MODEL, rules=RULES) -> Transformer:
    def make() -> Transformer:
        rngs = nnx.Rngs(0)
        return add_adapters(Transformer(config, rngs), rules, rngs)

    return nnx.jit(make)()


@nnx.jit
def logits(model: Transformer) -> jax.Array:
    return model(TOKENS)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (4, 5)), ((2, 3), (7,))])
def test_a_layer_computes_the_formula_of_its_paper(method, inputs, outputs):
    rngs = nnx.Rngs(0)
    axes = tuple(f"dim{i}" for i in range(len(inputs) + len(outputs)))
    layer = Linear(inputs, outputs, axes, rngs=rngs, initialize=lambda key, shape, _: jax.random.normal(key, shape))
    random = np.random.default_rng(0)
    x = random.normal(size=(3, *inputs))
    plain = np.asarray(layer(jnp.asarray(x, jnp.float32)))
    layer.adapter = nnx.data(Adapter(layer, AdapterRule(path="", method=method, rank=2, alpha=6), rngs))
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), plain, rtol=1e-6)
    b = random.normal(size=(2, *outputs))
    layer.adapter.b[...] = jnp.asarray(b, jnp.float32)
    w, a = (np.asarray(p, np.float64).reshape(6, -1) for p in (layer.kernel[...], layer.adapter.a[...]))
    whole = w + 6 / 2 * a @ b.reshape(2, -1)
    if method == "dora":
        m = random.uniform(1, 2, outputs)
        layer.adapter.magnitude[...] = jnp.asarray(m, jnp.float32)
        whole = m.reshape(-1) * whole / np.linalg.norm(whole, axis=0)
    expected = (x.reshape(3, 6) @ whole).reshape(3, *outputs)
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_adapters_change_nothing_at_first_and_merge_into_the_weights(scan):
    config = MODEL.model_copy(update={"scan_layers": scan})
    base = logits(model_of(config, ()))
    model = model_of(config)
    np.testing.assert_allclose(logits(model), base, atol=1e-5)
    adapted = logits(moved(model))
    assert float(jnp.abs(adapted - base).max()) > 0.05
    merged = merge_adapters(nnx.clone(model))
    assert not adapted_layers(merged) and adapted_layers(model)
    np.testing.assert_allclose(logits(merged), adapted, atol=1e-5)


def test_the_gradient_takes_doras_norm_as_a_constant():
    """Section 4.3: with m = |W + s A B| the gradient of B is LoRA's, which a norm that moves along would not give."""

    def gradient(method: str):
        model = model_of(rules=[AdapterRule(path="up_proj", method=method, rank=4)])
        gradients = nnx.jit(nnx.grad(lambda model: jnp.sum(model(TOKENS) ** 2)))(model)
        return gradients.decoder.layers[0].mlp.up_proj.adapter.b[...]

    np.testing.assert_allclose(gradient("dora"), gradient("lora"), rtol=2e-4, atol=2e-5)


def test_rules_may_tell_layers_apart_where_they_are_unrolled():
    rules = [AdapterRule(path="layers/1/.*q_proj")]
    layers = adapted_layers(model_of(MODEL.model_copy(update={"scan_layers": False}), rules))
    assert list(layers) == ["decoder/layers/1/attention/q_proj"]
    with pytest.raises(ConfigError, match="adapters.rules: .*layers/1/.*one scan runs both"):
        model_of(MODEL, rules)
    with pytest.raises(ConfigError, match=r"adapters.rules, .*'experts' matches no"):
        model_of(MODEL, [AdapterRule(path="experts")])


def test_dropout_is_for_training_only_and_differs_between_layers():
    model = moved(model_of(rules=[AdapterRule(path="q_proj", rank=4, dropout=0.5)]))
    run = nnx.jit(lambda model, key: model(TOKENS, dropout_key=key))
    plain = logits(model)
    one = run(model, jax.random.key(0))
    two = run(model, jax.random.key(1))
    assert float(jnp.abs(one - two).max()) > 1e-3 and float(jnp.abs(one - plain).max()) > 1e-3
    np.testing.assert_array_equal(run(model, jax.random.key(0)), one)
    np.testing.assert_allclose(logits(merge_adapters(model)), plain, atol=1e-5)


def test_decoding_with_absorbed_matrices_adapts_them_too():
    """Latent attention multiplies the matrix that expands latents with queries and outputs; layers are scanned."""
    latent = {"name": "latent", "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    config = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, head_dim=8, attention=latent)
    model = moved(model_of(config, [AdapterRule(path="kv_b_proj", method="dora", rank=3)]))

    @nnx.jit
    def last_logits(model):
        _, cache = model.prefill(TOKENS[:, :8], jnp.full(2, 8), 9)
        return model.decode(TOKENS[:, 8:9], jnp.full((2, 1), 8), cache)[0], model(TOKENS[:, :9])[:, -1:]

    np.testing.assert_allclose(*last_logits(model), rtol=1e-4, atol=1e-5)


MIXTURE = MoEConfig(num_experts=3, num_experts_per_tok=2, expert_bias=True)
EXPERTS = MODEL.model_copy(update={"moe": MIXTURE, "num_layers": 3})
EXPERT_RULES = (
    AdapterRule(path="(gate|up)_proj", rank=2, alpha=6),
    AdapterRule(path="down_proj", method="dora", rank=3),
)


@pytest.mark.longer
def test_adapters_of_experts_have_the_gradients_of_merged_weights():
    """For W' = W + s A B those of A and B follow from that of W'; DoRA's of m and B from W' = m V / |V|."""
    rngs = nnx.Rngs(0)
    layer = cast(Any, moved(cast(Any, add_adapters(MoE(EXPERTS, rngs), EXPERT_RULES, rngs))))
    x = jax.random.normal(jax.random.key(1), (1, 6, 32))

    @nnx.jit
    def values_and_gradients(layer):
        run = nnx.value_and_grad(lambda layer: jnp.sum(jnp.sin(layer(x)[0])))
        return run(layer), run(merge_adapters(nnx.clone(layer)))

    (found, gradients), (wanted, of_merged) = values_and_gradients(layer)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert list(adapted_layers(layer)) == ["down_proj", "gate_proj", "up_proj"]
    for name, projection in adapted_layers(layer).items():
        adapter, own = projection.adapter, gradients[name].adapter
        a, b = adapter.a[...], adapter.b[...]
        d_weight = of_merged[name].kernel[...]
        if adapter.magnitude is not None:
            whole = projection.kernel[...] + adapter.scale * a @ b
            direction = whole / jnp.linalg.norm(whole, axis=1, keepdims=True)
            np.testing.assert_allclose(own.magnitude[...], jnp.sum(d_weight * direction, axis=1), rtol=1e-3, atol=1e-5)
            d_weight *= adapter.magnitude[...][:, None] * direction / whole
        np.testing.assert_allclose(own.a[...], adapter.scale * d_weight @ b.mT, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(own.b[...], adapter.scale * a.mT @ d_weight, rtol=1e-3, atol=1e-5)


def test_experts_count_in_the_planner_and_refuse_dropout():
    numbers = 3 * 3 * (2 * 2 * (32 + 48) + 3 * (48 + 32) + 32)
    model = nnx.eval_shape(lambda: model_of(EXPERTS, EXPERT_RULES))
    added = sum(sum(p.size for p in jax.tree.leaves(nnx.state(x.adapter))) for x in adapted_layers(model).values())
    matrices = 3 * (4 * 32 * 32 + 3 * 3 * 32 * 48) + 2 * 64 * 32
    share = adapter_share(AdapterConfig(rules=EXPERT_RULES), model_shape(EXPERTS))
    assert added == numbers and share == pytest.approx(numbers / matrices)
    with pytest.raises(ConfigError, match=r"adapters.rules: .*/mlp/gate_proj/.* routed experts.*has 0.1\. Set it to 0"):
        model_of(EXPERTS, [AdapterRule(path="gate_proj", dropout=0.1)])


ADAPT = "adapters.rules=[{path: attention, rank: 4, alpha: 8}, {path: down_proj, method: dora, rank: 2}]"
FREEZE_ALL = "optimizer.groups=[{path: kernel|head, frozen: true}]"
LAYOUTS = {
    "unrolled, accumulation": ("model.scan_layers=false", "train.gradient_accumulation=2"),
    "fsdp": ("parallel.data=2", "parallel.fsdp=2", "train.gradient_accumulation=2"),
    "tensor": ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true"),
    "zero": ("parallel.data=4", "parallel.zero=2"),
    "remat": ("parallel.fsdp=4", "model.remat=full"),
}


def trainer_of(*overrides: str):
    return make_trainer(small_config("train.global_batch_size=8", ADAPT, *overrides))


@pytest.fixture(scope="module")
def on_one_device():
    """Losses with scanned and with unrolled layers."""
    return {scan: run_steps(trainer_of(f"model.scan_layers={str(scan).lower()}"), 3) for scan in (True, False)}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if name in ("remat", "zero") else []) for name in LAYOUTS],
)
def test_layouts_give_the_loss_of_one_device_and_train_the_adapters_only(layout, on_one_device):
    trainer = trainer_of(*LAYOUTS[layout])
    before = jax.tree.map(np.asarray, trainer.state.params)
    losses = run_steps(trainer, 3)
    np.testing.assert_allclose(losses, on_one_device["unrolled" not in layout], rtol=2e-5)
    after = trainer.state.params
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    for path, moves in jax.tree_util.tree_leaves_with_path(changed):
        assert moves == Adapters().adds(path_name(path)), path_name(path)


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.exhaustive)])
def test_the_weights_run_in_fp8_and_the_adapters_beside_them(recipe):
    trainer = trainer_of(f"precision.fp8={recipe}", "parallel.fsdp=2")
    losses = run_steps(trainer, 4)
    assert losses[-1] < losses[0] and trainer.module.fp8_matmuls == 3 * 14


def test_the_optimizer_holds_two_moments_of_the_adapters():
    trainer = trainer_of()
    adapters = trainer.module.split_added(trainer.abstract_state.params)[1]
    # q, k, v and o: [32, 4] and [4, 32]; down: [48, 2], [2, 32] and a magnitude for each of 32 outputs.
    numbers = 2 * (4 * 2 * 32 * 4 + 2 * (48 + 32) + 32)
    assert sum(x.size for x in jax.tree.leaves(adapters)) == numbers
    moments = [x for x in jax.tree.leaves(trainer.abstract_state.optimizer) if x.ndim]
    assert sum(x.size * x.dtype.itemsize for x in moments) == 2 * 4 * numbers


def test_the_parameters_of_adapters_count_as_trained():
    trainer = trainer_of()
    config = small_config()
    said = []
    _describe(config, cast(Any, SimpleNamespace(describe=lambda: "")), trainer, said.append)
    numbers = sum(x.size for x in jax.tree.leaves(trainer.module.split_added(trainer.abstract_state.params)[1]))
    total = count_parameters(config.model).total
    assert said[-1].startswith(f"{numbers:,} parameters are trained ({numbers / (numbers + total):.2%}); {total:,} are")


def test_frozen_weights_cost_four_flops_a_parameter_instead_of_six():
    plain = make_trainer(small_config())
    adapted = trainer_of()
    assert plain.frozen_parameters() == {}
    config = small_config().model
    assert flops_saved_per_token(config, adapted.frozen_parameters()) == 2 * count_parameters(config).matmul
    mixture = small_config("model.moe={num_experts: 4, num_experts_per_tok: 2, first_k_dense_replace: 1}", FREEZE_ALL)
    saved = flops_saved_per_token(mixture.model, make_trainer(mixture).frozen_parameters())
    assert saved == 2 * count_parameters(mixture.model).matmul


def test_groups_may_train_more_than_the_adapters():
    trainer = trainer_of("optimizer.groups=[{path: norm, frozen: false}, {path: adapter/b, learning_rate_scale: 4}]")
    trained = trainer.module.split_frozen(trainer.module.abstract_params)[0]
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    assert "final_norm/scale" in names and "embedding/table" not in names
    assert "decoder/layers/0/attention/q_proj/adapter/a" in names


def test_a_pipeline_refuses_adapters():
    with pytest.raises(ConfigError, match="adapters do not support a pipeline"):
        small_config(ADAPT, "parallel.pipeline=2", "parallel.data=4")
