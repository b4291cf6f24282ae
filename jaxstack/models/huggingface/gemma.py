"""Gemma 2 (Gemma Team 2024), and the text models of Gemma 3 (2025) and 4 (2026): norms before and after sublayers,
windows in some layers.
"""

from collections.abc import Sequence
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import (
    Keys,
    Row,
    activation,
    always,
    find,
    fixed,
    layer_types,
    rope,
    rope_keys,
    same,
    windows,
)
from jaxstack.models.huggingface.family import NESTED, Family, Multimodal
from jaxstack.models.huggingface.llama import ATTENTION, ENDS, LAYER, MLP, attention_bias, max_positions, shape
from jaxstack.models.huggingface.tensors import Tensor

_NORMS = (
    Tensor("layers/attention_norm/scale", LAYER + "input_layernorm.weight", ((0,),)),
    Tensor("layers/attention_post_norm/scale", LAYER + "post_attention_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_norm/scale", LAYER + "pre_feedforward_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", ((0,),)),
)


def _every_second(config: Keys, layers: int) -> Sequence[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _all_but_every_nth(config: Keys, layers: int) -> Sequence[bool]:
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _whole_scalar(model: ModelConfig) -> int:
    """Return the model's `query_pre_attn_scalar` as an integer, which transformers requires."""
    scalar = model.score_divisor
    if scalar != int(scalar):
        raise ConfigError(f"Gemma's query_pre_attn_scalar is a whole number; the model's is {scalar}.")
    return int(scalar)


def _shape(attention_cap: float | None, final_cap: float | None) -> tuple[Row, ...]:
    scalar = "query_pre_attn_scalar"
    return (
        *shape(kv_heads=4, head_dim=256, tied=True),
        attention_bias(),
        same(scalar, scalar, 256.0, _whole_scalar),
        same("attn_logit_softcapping", "attn_logit_softcapping", attention_cap),
        same("final_logit_softcapping", "final_logit_softcapping", final_cap),
        activation("hidden_activation", "gelu_pytorch_tanh"),
        fixed("use_bidirectional_attention", None, False),
        always(norm="rms_norm_unit_offset", post_norms=True, mlp="gated", scale_embeddings=True),
    )


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rows=(
        *_shape(50.0, 30.0),
        max_positions(8192),
        rope(),
        windows(("layer_types",), _every_second, layer_types),
    ),
    tensors=(*ENDS, *ATTENTION, *_NORMS, *MLP),
    ignored=frozenset(["hidden_act"]),  # hidden_activation has precedence
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rows=(
        *_shape(None, None),
        max_positions(131072),
        rope(1_000_000.0, local=10_000.0),
        windows(("layer_types", "sliding_window_pattern", "_sliding_window_pattern"), _all_but_every_nth, layer_types),
        always(qk_norm=True),
    ),
    tensors=(*ENDS, *ATTENTION, *_NORMS, *MLP),
    nested=NESTED,
    buffers=r".*rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*",
)

GEMMA3_MULTIMODAL = Multimodal(
    GEMMA3,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    ignored=frozenset(
        ["vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"]
    ),
)


def _whether_windowed(config: Keys) -> list[bool]:
    """Return for each layer True if it has a window; transformers lets the last one see all keys."""
    count = find(config, "num_hidden_layers")
    named = config.get("layer_types")
    if named is None:
        return [(layer + 1) % 6 != 0 for layer in range(count - 1)] + [False] * (count > 0)
    if list(named)[-1:] != ["full_attention"]:
        raise ConfigError(f"config.json: layer_types must end with full_attention in Gemma 4; found {named[-1:]}.")
    return [kind == "sliding_attention" for kind in named]


def _global_heads(config: Keys) -> Keys:
    """Return `head_dim` and `num_key_value_heads` of layers without a window, where they differ from the model's.

    Released files have keys for them; transformers writes `per_layer_config`, an entry for each of these layers.
    """
    wide = {str(layer) for layer, windowed in enumerate(_whether_windowed(config)) if not windowed}
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        count = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": count}
    entries = list(by_layer.values())
    known = all(set(entry) <= {"head_dim", "num_key_value_heads"} for entry in entries)
    if set(by_layer) != wide or any(entry != entries[0] for entry in entries) or not known:
        raise ConfigError(
            "config.json: per_layer_config must give head_dim and num_key_value_heads, the same for all layers of type "
            f"full_attention, and nothing for the others; found {str(by_layer)[:100]}."
        )
    return entries[0] if entries else {}


def _read_gemma4_attention(config: Keys) -> dict[str, Any]:
    heads = _global_heads(config)
    width = heads.get("head_dim")
    count = heads.get("num_key_value_heads")
    kind = {
        "name": "gemma4",
        "global_head_dim": None if width == config.get("head_dim", 256) else width,
        "num_global_kv_heads": None if count == config.get("num_key_value_heads", 4) else count,
        "attention_k_eq_v": config.get("attention_k_eq_v", False),
    }
    return {"attention": kind}


def _write_gemma4_attention(model: ModelConfig) -> dict[str, Any]:
    kind = model.attention
    if not isinstance(kind, GemmaAttention):
        raise ConfigError(f"gemma4_text cannot express this model: attention.name {kind.name}, not gemma4.")
    return {
        "global_head_dim": kind.global_head_dim or model.width_per_head,
        "num_global_key_value_heads": kind.num_global_kv_heads,
        "attention_k_eq_v": kind.attention_k_eq_v,
    }


_GEMMA4_ROPE = rope(1_000_000.0, local=10_000.0)
_ROPE = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}}


def _write_gemma4_rope(model: ModelConfig) -> dict[str, Any]:
    scaling = rope_keys(model.rope_scaling) or {"rope_type": "default"}
    local = model.rope_local_base_freq or model.rope_theta
    by_type = {
        "full_attention": {"rope_theta": model.rope_theta, **scaling},
        "sliding_attention": {"rope_theta": local, "rope_type": "default"},
    }
    return {"rope_parameters": by_type}


def _read_sharing(config: Keys) -> dict[str, Any]:
    """Read which layers reuse keys and values, and the embeddings of each layer, which have the model's vocabulary."""
    shared = find(config, "num_kv_shared_layers", 0)
    width = find(config, "hidden_size_per_layer_input", 256) or None
    rows = find(config, "vocab_size_per_layer_input", 262144)
    if width and rows != config.get("vocab_size"):
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input ({rows}) must be vocab_size ({config.get('vocab_size')})."
        )
    wide = find(config, "use_double_wide_mlp", False) and shared > 0
    return {
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": width,
    }


def _write_sharing(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_kv_shared_layers": model.num_kv_shared_layers,
        "use_double_wide_mlp": model.use_double_wide_mlp,
        "hidden_size_per_layer_input": model.hidden_size_per_layer_input or 0,
        "vocab_size_per_layer_input": model.vocab_size,
    }


_EXPERTS = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
}
"""Keys of a mixture of experts -> ours."""


def _read_experts(config: Keys) -> dict[str, Any]:
    if not config.get("enable_moe_block"):
        return {}
    return {"moe": {ours: find(config, theirs) for theirs, ours in _EXPERTS.items()} | {"beside_mlp": True}}


def _write_experts(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {"enable_moe_block": False}
    keys = {theirs: getattr(moe, ours) for theirs, ours in _EXPERTS.items()}
    return {"enable_moe_block": True, **keys, "moe_intermediate_size": model.expert_size}


def _experts(name: str, theirs: str, joined: int | None = None) -> Tensor:
    """Return the row of the kernel [E, in, out] of a projection of all experts; the files have [E, out, in]."""
    path = f"layers/mlp/experts/{name}/kernel"
    return Tensor(path, LAYER + f"experts.{theirs}", ((0,), (2,), (1,)), joined, of_experts=True)


_EXPERT_TENSORS = (
    _experts("gate_proj", "gate_up_proj", joined=1),
    _experts("up_proj", "gate_up_proj", joined=1),
    _experts("down_proj", "down_proj"),
    Tensor("layers/mlp/experts/router/kernel", LAYER + "router.proj.weight", ((1,), (0,))),
    Tensor("layers/mlp/experts/router_scale", LAYER + "router.scale", ((0,),)),
    Tensor("layers/mlp/experts/expert_scale", LAYER + "router.per_expert_scale", ((0,),)),
    Tensor("layers/mlp/experts/input_scale", LAYER + "pre_feedforward_layernorm_2.weight", ((0,),)),
    Tensor("layers/mlp/dense_norm/scale", LAYER + "pre_feedforward_layernorm.weight", ((0,),)),
    Tensor("layers/mlp/dense_post_norm/scale", LAYER + "post_feedforward_layernorm_1.weight", ((0,),)),
    Tensor("layers/mlp/experts_post_norm/scale", LAYER + "post_feedforward_layernorm_2.weight", ((0,),)),
)

_PER_LAYER_EMBEDDING = (
    Tensor("per_layer_embedding/embedding/table", "model.embed_tokens_per_layer.weight", ((0,), (1,))),
    Tensor("per_layer_embedding/projection", "model.per_layer_model_projection.weight", ((1, 2), (0,))),
    Tensor("per_layer_embedding/norm/scale", "model.per_layer_projection_norm.weight", ((0,),)),
    Tensor("layers/per_layer_input/gate/kernel", LAYER + "per_layer_input_gate.weight", ((1,), (0,))),
    Tensor("layers/per_layer_input/projection/kernel", LAYER + "per_layer_projection.weight", ((1,), (0,))),
    Tensor("layers/per_layer_input/norm/scale", LAYER + "post_per_layer_input_norm.weight", ((0,),)),
)

GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    rows=(
        *shape(kv_heads=4, head_dim=256, tied=True),
        attention_bias(),
        max_positions(131072),
        same("final_logit_softcapping", "final_logit_softcapping", None),
        activation("hidden_activation", "gelu_pytorch_tanh"),
        fixed("use_bidirectional_attention", None, "vision"),  # text is causal with both
        windows(("layer_types",), lambda config, layers: _whether_windowed(config), layer_types, default=512),
        Row(
            ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config"),
            _read_gemma4_attention,
            _write_gemma4_attention,
        ),
        Row(
            _GEMMA4_ROPE.keys,
            lambda config: _GEMMA4_ROPE.read({**config, "rope_parameters": config.get("rope_parameters") or _ROPE}),
            _write_gemma4_rope,
        ),
        Row(
            (
                "num_kv_shared_layers",
                "use_double_wide_mlp",
                "hidden_size_per_layer_input",
                "vocab_size_per_layer_input",
            ),
            _read_sharing,
            _write_sharing,
        ),
        Row(("enable_moe_block", *_EXPERTS), _read_experts, _write_experts),
        fixed("expert_intermediate_size", None),  # null in the files of the dense models
        always(
            norm="rms_norm",
            post_norms=True,
            qk_norm=True,
            layer_scalars=True,
            query_pre_attn_scalar=1.0,
            mlp="gated",
            scale_embeddings=True,
        ),
    ),
    tensors=(
        *ENDS,
        *ATTENTION,
        *_NORMS,
        *MLP,
        *(row._replace(path=row.path.replace("layers/mlp/", "layers/mlp/dense/")) for row in MLP),
        *_EXPERT_TENSORS,
        Tensor("layers/layer_scalar", LAYER + "layer_scalar", ((0,),)),
        *_PER_LAYER_EMBEDDING,
    ),
    nested=NESTED,
    # Released files have keys and values of layers that do not use them.
    buffers=r".*rotary_emb\..*inv_freq|(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*"
    r"|model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",
)

GEMMA4_MULTIMODAL = Multimodal(
    GEMMA4,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
    },
    ignored=frozenset(
        ["vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"]
        + ["boa_token_id", "eoa_token_index", "eoa_token_id", "audio_token_id", "vision_soft_tokens_per_image"]
    ),
)
