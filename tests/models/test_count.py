"""Numbers computed from the configuration against the real tree, and against formulas of the papers."""

import math

import jax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstack.models import ModelConfig, Transformer, count_parameters, model_flops_per_token, preset_config
from jaxstack.models.count import describe_flops
from jaxstack.models.moe.router import MoEConfig
from jaxstack.models.recurrent import GatedDelta, KimiDelta, StateSpace


@st.composite
def mixtures(draw) -> MoEConfig:
    experts = draw(st.integers(1, 4))
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        moe_intermediate_size=draw(st.none() | st.integers(1, 20)),
        n_shared_experts=draw(st.integers(0, 2)),
        balance_bias=draw(st.booleans()),
        first_k_dense_replace=draw(st.integers(0, 2)),
        decoder_sparse_step=draw(st.integers(1, 2)),
    )


@st.composite
def configs(draw) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    positions = draw(st.sampled_from(["rope", "learned", "none"]))
    layers = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=layers))
    moe = draw(st.none() | mixtures())
    flags = ["post_norms", "qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tie_word_embeddings", "scan_layers"]
    return ModelConfig(
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=draw(st.integers(1, 24)),
        num_layers=layers,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        intermediate_size=draw(st.none() | st.integers(1, 20)),
        norm=draw(st.sampled_from(["rms_norm", "rms_norm_unit_offset", "layer_norm"])),
        mlp=draw(st.sampled_from(["gated", "plain"])),
        positions=positions,
        max_position_embeddings=7 if positions == "learned" else None,
        layer_types=tuple(kinds),
        sliding_window=3,
        moe=moe,
        num_nextn_predict_layers=draw(st.integers(0, 2)),
        **{flag: draw(st.booleans()) and not (flag == "mlp_bias" and moe) for flag in flags},
    )


@settings(max_examples=25, deadline=None)
@given(configs())
def test_count_equals_the_tree(config):
    tree = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(tree, nnx.Param))]
    assert sum(sizes) == count_parameters(config).total


def test_flops_of_llama_8b():
    """6 x matmul parameters + 6 x layers x length x width: half of 12 for causal attention."""
    config = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336
    )
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    matmul = 32 * layer + 128256 * 4096
    assert count_parameters(config).matmul == matmul
    assert model_flops_per_token(config, 8192) == 6 * matmul + 6 * 32 * 8192 * 4096


def test_flops_of_a_window_count_the_keys_seen():
    config = ModelConfig(vocab_size=64, num_layers=1, layer_types=("sliding_attention",), sliding_window=100)
    seen = sum(min(t + 1, 100) for t in range(1000)) / 1000
    attention = model_flops_per_token(config, 1000) - 6 * count_parameters(config).matmul
    assert attention == pytest.approx(12 * 256 * seen, rel=0.01)
    wide = config.model_copy(update={"sliding_window": 5000})
    assert model_flops_per_token(wide, 1000) == model_flops_per_token(
        config.model_copy(update={"layer_types": ("full_attention",)}), 1000
    )


def test_the_input_embedding_is_no_matmul():
    tied = ModelConfig(vocab_size=64, tie_word_embeddings=True)
    untied = ModelConfig(vocab_size=64)
    assert count_parameters(tied).matmul == count_parameters(untied).matmul
    assert count_parameters(untied).total - count_parameters(tied).total == 64 * 256


def test_active_parameters_of_mixtures():
    """12.9 of 46.7 billion (Jiang et al. 2024), 3.3 of 30.5 billion (Qwen Team 2025); one expert is a dense model."""
    mixtral, qwen = (count_parameters(preset_config(name)) for name in ("mixtral-8x7b", "qwen3-30b-a3b"))
    assert mixtral.active == pytest.approx(12.9e9, rel=0.005) and qwen.active == pytest.approx(3.35e9, rel=0.005)
    expert = 3 * 4096 * 14336
    assert mixtral.total - mixtral.active == 32 * (8 - 2) * expert
    assert mixtral.matmul == mixtral.active - 32000 * 4096 - (2 * 32 + 1) * 4096
    dense = ModelConfig(vocab_size=64)
    one = count_parameters(dense.model_copy(update={"moe": MoEConfig(num_experts=1, num_experts_per_tok=1)}))
    assert one.total == one.active == count_parameters(dense).total + 4 * 256
    assert count_parameters(dense).active == count_parameters(dense).total


@pytest.mark.parametrize(
    ("types", "of_layers", "said"),
    [
        (["delta"], 18 * 3 * 4 * 5, "recurrences"),
        (["kda"], 18 * 2 * 4 * 6, "recurrences"),
        (["ssd", "full_attention"], 12 * 3 * 5 * 7 + 6 * 10 * 16, "causal attention + recurrences"),
        (["full_attention"], 6 * 10 * 16, "causal attention"),
    ],
)
def test_flops_of_recurrent_layers_do_not_depend_on_the_length_and_are_named(types, of_layers, said):
    config = ModelConfig(
        vocab_size=8,
        hidden_size=16,
        num_layers=len(types),
        num_heads=2,
        layer_types=tuple(types),
        delta=GatedDelta(num_heads=3, head_dim=5, num_key_heads=3, key_head_dim=4),
        kda=KimiDelta(num_heads=2, head_dim=6, num_key_heads=2, key_head_dim=4),
        ssd=StateSpace(num_heads=3, head_dim=5, state_size=7),
    )
    assert model_flops_per_token(config, 10) == 6 * count_parameters(config).matmul + of_layers
    assert describe_flops(config) == f"6 x matmul parameters + {said}"
