"""Gated DeltaNet with gated attention, and Kimi Delta Attention with latent attention: counted, generated from, served,
and the same on several devices."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, count_parameters
from jaxstack.models.adapters import AdapterRule, adapted_layers, add_adapters, merge_adapters
from jaxstack.models.count import model_flops_per_token
from jaxstack.optim.base import is_matrix
from tests.models.test_layers import SHAPE, make, serve_and_compare
from tests.parallel.test_layouts import assert_trains_as_one_device

DELTA = dict(num_heads=4, head_dim=6, num_key_heads=2, key_head_dim=8)
HYBRID = dict(
    **{**SHAPE, "num_layers": 4}, delta=DELTA, layer_types=("delta", "delta", "delta", "full_attention"),
    attention={"name": "gated"}, qk_norm=True, norm="rms_norm_unit_offset", partial_rotary_factor=0.5,
)  # fmt: skip
LATENT = dict(name="latent", kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
KIMI = dict(
    **{**SHAPE, "num_layers": 3, "num_kv_heads": None}, kda={**DELTA, "head_dim": 8}, attention=LATENT, head_dim=12,
    layer_types=("kda", "kda", "full_attention"), positions="none",
)  # fmt: skip
MIXTURE = dict(num_experts=4, moe_intermediate_size=16, n_shared_experts=1, shared_expert_gate=True)


@pytest.mark.parametrize("shape", [HYBRID, KIMI], ids=["delta", "kda"])
def test_layers_are_counted(shape):
    config = ModelConfig(**shape, moe=MIXTURE)
    params = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
    paths = {"/".join(map(str, keys)): variable for keys, variable in nnx.to_flat_state(params)}
    decayed = {
        path.split("/attention/")[1] for path, x in paths.items() if "layers/0/att" in path and is_matrix(path, x)
    }
    own = ("in_proj_z", "in_proj_a") if shape is HYBRID else ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
    assert decayed == {f"{name}/kernel" for name in (*own, *(f"in_proj_{name}" for name in "qkvb"), "out_proj")}


def test_flops_are_those_of_the_recurrence():
    alone = ModelConfig(**SHAPE, delta=DELTA, layer_types=("delta",))
    wanted = 6 * count_parameters(alone).matmul + 7 * 18 * 4 * 8 * 6
    assert model_flops_per_token(alone, 64) == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [HYBRID, KIMI], ids=["delta", "kda"])
def test_a_hybrid_is_generated_from_and_served(shape):
    serve_and_compare(ModelConfig(**shape))


def test_adapters_of_kimi_delta_attention_are_merged():
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, 61)
    model = make(ModelConfig(**KIMI))
    plain = model(tokens)
    add_adapters(model, (AdapterRule(path="attention/", rank=2),), nnx.Rngs(1))
    layers = adapted_layers(model)
    assert {f"decoder/layers/0/attention/{name}_{part}_proj" for name in "fg" for part in "ab"} <= set(layers)
    for layer in layers.values():
        layer.adapter.b[...] = 0.1 * jax.random.normal(jax.random.key(2), layer.adapter.b.shape)
    adapted = model(tokens)
    assert np.abs(adapted - plain).max() > 0.05
    np.testing.assert_allclose(merge_adapters(model)(tokens), adapted, atol=1e-4)


KIMI_TRAINED = (
    "model.layer_types=[kda,full_attention]",
    "model.kda={num_heads: 8, head_dim: 4, num_key_heads: 8, key_head_dim: 6}",
    "model.attention={name: latent, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 6}",
    "model.head_dim=12",
    "model.num_kv_heads=null",
    "model.positions=none",
)
TRAINED = (
    "model.layer_types=[delta,full_attention]",
    "model.delta={num_heads: 8, head_dim: 4, num_key_heads: 4, key_head_dim: 6}",
    "model.attention={name: gated}",
    "model.num_layers=4",  # two stages of a pipeline need two groups of the layer types
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tensor=2", "parallel.context=2", "parallel.fsdp=2"),
        ("parallel.tensor=2", "parallel.context=2", "parallel.context_method=all_gather"),
        pytest.param(("parallel.tensor=8",), marks=pytest.mark.exhaustive),  # more devices than heads of keys
        pytest.param(("parallel.pipeline=2", "parallel.context=4"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_layouts_train_as_one_device(overrides):
    """Each device has some heads, and with `context` whole sequences of fewer heads, or the states of all parts."""
    assert_trains_as_one_device(*overrides, shape=TRAINED)


def test_kimi_delta_attention_trains_in_parts_as_on_one_device():
    assert_trains_as_one_device("parallel.tensor=2", "parallel.context=2", "parallel.fsdp=2", shape=KIMI_TRAINED)


@pytest.mark.exhaustive
def test_kimi_delta_attention_gathers_states_where_devices_do_not_divide_the_heads():
    heads = "model.kda={num_heads: 3, head_dim: 4, num_key_heads: 3, key_head_dim: 6}"
    assert_trains_as_one_device("parallel.context=2", shape=(*KIMI_TRAINED, heads))
