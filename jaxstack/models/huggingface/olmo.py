"""Hugging Face formats of OLMo 2 (OLMo Team 2025, arXiv:2501.00656), with norms of outputs and of all heads together,
OLMo 3 (2025), which adds windows, and scales the rotary positions of the other layers, and OLMo Hybrid (2026), which
has three gated DeltaNet layers, with norms of inputs, to one such layer of attention.
"""

from collections.abc import Sequence
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import (
    Keys,
    Row,
    activation,
    always,
    find,
    layer_types,
    repeated_part,
    rope,
    rope_keys,
    windows,
)
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import ATTENTION, ENDS, LAYER, MLP, attention_bias, max_positions, shape
from jaxstack.models.huggingface.qwen import delta_tensors
from jaxstack.models.huggingface.tensors import Tensor

_HEAD_NORMS = tuple(f"layers/attention/{name}/scale" for name in ("q_norm", "k_norm"))
TENSORS = (
    *ENDS,
    *(row for row in ATTENTION if row.path not in _HEAD_NORMS),
    Tensor("layers/attention/q_norm/scale", LAYER + "self_attn.q_norm.weight", ((0, 1),)),
    Tensor("layers/attention/k_norm/scale", LAYER + "self_attn.k_norm.weight", ((0, 1),)),
    Tensor("layers/attention_post_norm/scale", LAYER + "post_attention_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", ((0,),)),
    *MLP,
)

_THETA = 500_000.0
_ROPE = rope(_THETA, local=_THETA)


def _read_rope(config: Keys) -> dict[str, Any]:
    """Read the base of all layers, and a scaling that layers with windows do not have."""
    fields = _ROPE.read(config)
    if "sliding_attention" not in (config.get("rope_parameters") or {}):
        fields["rope_local_base_freq"] = fields["rope_theta"]
    if fields["rope_scaling"] is None and fields["rope_local_base_freq"] == fields["rope_theta"]:
        fields["rope_local_base_freq"] = None  # one set of rotations serves all layers
    return fields


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    theta = model.rope_theta
    local = model.rope_local_base_freq or theta
    scaling = rope_keys(model.rope_scaling)
    if theta == local == _THETA:
        return {"rope_theta": theta, "rope_scaling": scaling}
    # transformers 5 reads a single rope_theta for one of the two types of layers only.
    whole = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return {
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _three_of_four(config: Keys, layers: int) -> Sequence[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(layers)]


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    rows=(
        *shape(norm_eps=1e-5),
        max_positions(2048),
        rope(),
        attention_bias(),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", pre_norms=False, post_norms=True, qk_norm="all_heads"),
    ),
    tensors=TENSORS,
)

OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    rows=(
        *(row for row in OLMO2.rows if "rope_theta" not in row.keys),
        Row(("rope_theta", "rope_scaling", "rope_parameters"), _read_rope, _write_rope),
        windows(("layer_types",), _three_of_four, layer_types),
    ),
    tensors=TENSORS,
)


_TYPES = {"linear_attention": "delta_pre_norms", "full_attention": "full_attention"}
_HYBRID_ROPE = rope(_THETA)


def _read_hybrid_rope(config: Keys) -> dict[str, Any]:
    """Read rotary positions; without a base, as the releases are, there are none."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if said.get("rope_theta", config.get("rope_theta")) is None:
        return {"positions": "none"}
    return _HYBRID_ROPE.read(config)


def _write_hybrid_rope(model: ModelConfig) -> dict[str, Any]:
    if model.positions == "rope":
        scaling = rope_keys(model.rope_scaling) or {"rope_type": "default"}
        return {"rope_parameters": {**scaling, "rope_theta": model.rope_theta}}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _read_hybrid_layers(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    default = ["linear_attention" if i % 4 != 3 else "full_attention" for i in range(count)]
    named = config.get("layer_types") or default
    if len(named) != count or not set(named) <= set(_TYPES):
        raise ConfigError(
            f"config.json: layer_types must have linear_attention or full_attention for each of {count} layers; found "
            f"{len(named)} of {', '.join(sorted(set(map(str, named))))}."
        )
    heads = find(config, "num_attention_heads")
    key_heads = config.get("linear_num_key_heads") or heads
    key_width = config.get("linear_key_head_dim") or 3 * find(config, "hidden_size") // (4 * key_heads)
    delta = {
        "num_heads": config.get("linear_num_value_heads") or heads,
        "num_key_heads": key_heads,
        "key_head_dim": key_width,
        "head_dim": config.get("linear_value_head_dim") or 2 * key_width,
        "conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "allow_neg_eigval": config.get("linear_allow_neg_eigval", True),
        "norm_eps": 1e-5,  # whatever rms_norm_eps says
    }
    return {"layer_types": repeated_part([_TYPES[name] for name in named]), "delta": delta}


def _write_hybrid_layers(model: ModelConfig) -> dict[str, Any]:
    linear = [getattr(layer.mixer, "name", None) == "delta" for layer in model.layers()]
    return {
        "layer_types": ["linear_attention" if kind else "full_attention" for kind in linear],
        "linear_num_value_heads": model.delta.num_heads,
        "linear_num_key_heads": model.delta.num_key_heads,
        "linear_key_head_dim": model.delta.key_head_dim,
        "linear_value_head_dim": model.delta.head_dim,
        "linear_conv_kernel_dim": model.delta.conv_kernel,
        "linear_allow_neg_eigval": model.delta.allow_neg_eigval,
    }


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    rows=(
        *shape(),
        max_positions(65536),
        Row(_HYBRID_ROPE.keys, _read_hybrid_rope, _write_hybrid_rope),
        Row(
            (
                "layer_types",
                *(f"linear_{name}" for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")),
                "linear_conv_kernel_dim",
                "linear_allow_neg_eigval",
            ),
            _read_hybrid_layers,
            _write_hybrid_layers,
        ),
        # The default of transformers is an id of OLMo's own tokenizer, which it looks up in the embedding.
        Row((), lambda config: {}, lambda model: {"pad_token_id": None}),
        attention_bias(),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", pre_norms=False, post_norms=True, qk_norm="all_heads"),
    ),
    tensors=(
        *TENSORS,
        Tensor("layers/attention_norm/scale", LAYER + "attention_layer_norm.weight", ((0,),)),
        Tensor("layers/mlp_norm/scale", LAYER + "feedforward_layer_norm.weight", ((0,),)),
        *delta_tensors("linear_attn."),
        Tensor("layers/attention/in_proj_z/kernel", LAYER + "linear_attn.g_proj.weight", ((1, 2), (0,))),
        Tensor("layers/attention/in_proj_a/kernel", LAYER + "linear_attn.a_proj.weight", ((1,), (0,))),
        Tensor("layers/attention/a_log", LAYER + "linear_attn.A_log", ((0,),)),
        Tensor("layers/attention/dt_bias", LAYER + "linear_attn.dt_bias", ((0,),)),
    ),
    # Of the initialization.
    ignored=frozenset(
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor", "use_gate")
    ),
)
