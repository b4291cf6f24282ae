"""Hugging Face formats of mixture-of-experts families: Mixtral (Jiang et al. 2024), Qwen 3 MoE, gpt-oss and the text
model of Llama 4 (2025).

Mixtral and Qwen store one tensor per expert; gpt-oss one of all experts, with gates and values in turn; Llama 4 one of
all experts, with the gates before the values.
"""

from collections.abc import Callable
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import (
    Keys,
    Row,
    activation,
    always,
    find,
    fixed,
    layer_types,
    repeated_part,
    rope,
    same,
    windows,
)
from jaxstack.models.huggingface.family import NESTED, Family, Multimodal
from jaxstack.models.huggingface.llama import (
    ATTENTION,
    ENDS,
    LAYER,
    NORMS,
    TENSORS,
    attention_bias,
    max_positions,
    shape,
)
from jaxstack.models.huggingface.tensors import Tensor
from jaxstack.models.moe.router import MoEConfig


def expert_keys(keys: dict[str, str], read: Callable[[Keys], dict[str, Any]], **constant: Any) -> Row:
    """Return the `Row` that converts config.json's mixture-of-experts keys to the fields of `ModelConfig.moe` and back.

    Args:
      keys: their names -> ours.
      read: returns the fields that depend on other keys.
      constant: fields that all models of the family share.
    """

    def fields(config: Keys) -> dict[str, Any]:
        named = {ours: config[theirs] for theirs, ours in keys.items() if theirs in config}
        return {"moe": {**constant, **named, **read(config)}}

    def write(model: ModelConfig) -> dict[str, Any]:
        moe = model.moe or MoEConfig(num_experts=1, num_experts_per_tok=1)
        return {theirs: getattr(moe, ours) for theirs, ours in keys.items()} | {
            "num_experts_per_tok": moe.num_experts_per_tok
        }

    return Row((*keys, "num_experts_per_tok", "num_experts", "num_local_experts"), fields, write)


def _count(config: Keys, default_chosen: int) -> dict[str, Any]:
    """Return two fields of `MoEConfig` from config.json: the numbers of experts and of experts per token."""
    number = config.get("num_experts") or find(config, "num_local_experts")
    return {"num_experts": number, "num_experts_per_tok": find(config, "num_experts_per_tok", default_chosen)}


def expert_tensors(router: str, experts: str, names: dict[str, str]) -> tuple[Tensor, ...]:
    """Return the rows of a mixture with a tensor for each expert.

    Args:
      router: name of the router's tensor within a layer.
      experts: beginning of the names of the experts' tensors within a layer.
      names: our projections -> theirs.
    """
    return (
        Tensor("layers/mlp/router/kernel", LAYER + router, ((1,), (0,))),
        *(
            Tensor(f"layers/mlp/{ours}/kernel", LAYER + experts + f".{{expert}}.{theirs}.weight", ((1,), (0,)))
            for ours, theirs in names.items()
        ),
    )


TRAINING_KEYS = frozenset(["output_router_logits", "router_jitter_noise"])

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    rows=(
        *shape(kv_heads=8, norm_eps=1e-5),
        same("intermediate_size", "intermediate_size", value=lambda model: model.expert_size),
        max_positions(131072),
        rope(1_000_000.0),
        windows(
            (),
            lambda config, layers: [True] * layers,
            lambda model: {"sliding_window": min(model.windows(), key=bool)},
            default=None,
        ),
        expert_keys(
            {"num_local_experts": "num_experts", "router_aux_loss_coef": "router_aux_loss_coef"},
            lambda config: _count(config, 2),
            norm_topk_prob=True,
        ),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=(
        *TENSORS,
        *expert_tensors(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts",
            {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        ),
    ),
    ignored=TRAINING_KEYS,
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rows=(
        *shape(kv_heads=4),
        max_positions(32768),
        rope(),
        attention_bias(),
        expert_keys(
            {
                "num_experts": "num_experts",
                "norm_topk_prob": "norm_topk_prob",
                "decoder_sparse_step": "decoder_sparse_step",
                "router_aux_loss_coef": "router_aux_loss_coef",
            },
            lambda config: {**_count(config, 8), "moe_intermediate_size": find(config, "moe_intermediate_size")},
            norm_topk_prob=False,
        ),
        Row(("moe_intermediate_size",), lambda config: {}, lambda model: {"moe_intermediate_size": model.expert_size}),
        fixed("mlp_only_layers", [], None),
        fixed("use_sliding_window", False),
        fixed("use_qk_norm", True),
        fixed("qkv_bias", False),
        fixed("shared_expert_intermediate_size", 0, None),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", qk_norm=True),
    ),
    tensors=(
        *TENSORS,
        *expert_tensors("mlp.gate.weight", "mlp.experts", {n: n for n in ("gate_proj", "up_proj", "down_proj")}),
    ),
    ignored=TRAINING_KEYS | {"sliding_window", "max_window_layers"},  # settings of windows, which are not used
)


def _joined_experts(name: str, theirs: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the kernel [E, in, out] and the bias of a projection of all experts.

    Args:
      theirs: name of the tensor within the experts; gates and values take turns along the last dim of gate_up_proj.
    """
    theirs = LAYER + f"mlp.experts.{theirs}"
    shared = "gate_up" in theirs
    return (
        Tensor(f"layers/mlp/{name}/kernel", theirs, ((0,), (1,), (2,)), 2 if shared else None, shared, True),
        Tensor(f"layers/mlp/{name}/bias", f"{theirs}_bias", ((0,), (1,)), 1 if shared else None, shared, True),
    )


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rows=(
        *shape(kv_heads=8, head_dim=64, norm_eps=1e-5),
        same("intermediate_size", "intermediate_size", value=lambda model: model.expert_size),
        max_positions(131072),
        rope(150_000.0),
        windows(("layer_types",), lambda config, layers: [i % 2 == 0 for i in range(layers)], layer_types, default=128),
        attention_bias(True),
        Row(("experts_per_token",), lambda config: {}, lambda model: {}),
        expert_keys(
            {
                "num_local_experts": "num_experts",
                "router_aux_loss_coef": "router_aux_loss_coef",
                "swiglu_limit": "swiglu_limit",
            },
            lambda config: {
                **_count(config, config.get("experts_per_token", 4)),
                "swiglu_limit": find(config, "swiglu_limit", 7.0),
            },
            expert_bias=True,
            router_bias=True,
        ),
        fixed("swiglu_alpha", 1.702),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", attention={"name": "softmax", "sinks": True}),
    ),
    tensors=(
        *TENSORS,
        Tensor("layers/attention/sinks", LAYER + "self_attn.sinks", ((0,),)),
        Tensor("layers/mlp/router/kernel", LAYER + "mlp.router.weight", ((1,), (0,))),
        Tensor("layers/mlp/router/bias", LAYER + "mlp.router.bias", ((0,),)),
        *_joined_experts("gate_proj", "gate_up_proj"),
        *_joined_experts("up_proj", "gate_up_proj"),
        *_joined_experts("down_proj", "down_proj"),
    ),
    ignored=TRAINING_KEYS | {"initial_context_length"},  # that of YaRN, which rope_scaling has too
)


_LLAMA4_TYPES = {
    (True, "chunked_attention"): "chunked_attention",
    (True, "full_attention"): "full_attention",
    (False, "full_attention"): "full_attention_no_rope",
}
"""(Whether a layer has rotary positions, its type in config.json) -> our type."""


def _read_llama4_layers(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    named = config.get("layer_types") or ["chunked_attention" if kind else "full_attention" for kind in rotates]
    size = config.get("attention_chunk_size", 8192)
    kinds = [(bool(kind), name if size else "full_attention") for kind, name in zip(rotates, named, strict=False)]
    strange = [name for kind, name in kinds[:count] if (kind, name) not in _LLAMA4_TYPES]
    if strange or len(kinds) < count:
        raise ConfigError(
            f"config.json: no_rope_layers and layer_types must have an entry for each of {count} layers, and a layer "
            f"with 0 must be full_attention; found {strange[0] if strange else f'{len(kinds)} entries'}."
        )
    types = repeated_part([_LLAMA4_TYPES[kind] for kind in kinds[:count]])
    return {"layer_types": types, "attention_chunk_size": size if "chunked_attention" in types else None}


def _write_llama4_layers(model: ModelConfig) -> dict[str, Any]:
    layers = model.layers()
    return {
        "no_rope_layers": [int(layer.rotation is not None) for layer in layers],
        "layer_types": ["chunked_attention" if layer.chunk else "full_attention" for layer in layers],
        "attention_chunk_size": model.attention_chunk_size or 8192,
    }


def _read_llama4_scale(config: Keys) -> dict[str, Any]:
    tuned = config.get("attn_temperature_tuning", True)
    return {
        "floor_scale": int(config.get("floor_scale", 8192)) if tuned else None,
        "attn_scale": config.get("attn_scale", 0.1),
    }


def _write_llama4_scale(model: ModelConfig) -> dict[str, Any]:
    tuned = model.floor_scale is not None
    return {
        "attn_temperature_tuning": tuned,
        "floor_scale": model.floor_scale if tuned else 8192,
        "attn_scale": model.attn_scale,
    }


def _read_llama4_experts(config: Keys) -> dict[str, Any]:
    step = config.get("interleave_moe_layer_step", 1)
    layers = list(range(step - 1, find(config, "num_hidden_layers"), step))
    if config.get("moe_layers", layers) not in (layers, None):
        raise ConfigError(
            f"config.json: moe_layers: {config['moe_layers']} is not supported; only every n-th layer, with n "
            f"interleave_moe_layer_step ({step})."
        )
    return {**_count(config, 1), "moe_intermediate_size": find(config, "intermediate_size", 8192)}


def _llama4_experts(name: str, theirs: str, joined: int | None = None) -> Tensor:
    """Return the row of the kernel [E, in, out] of a projection of all experts."""
    theirs = LAYER + f"feed_forward.experts.{theirs}"
    return Tensor(f"layers/mlp/{name}/kernel", theirs, ((0,), (1,), (2,)), joined, of_experts=True)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROTATED = tuple(f"layers/attention/{name}" for name in ("q_proj", "k_proj"))

LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    rows=(
        *(row for row in shape(kv_heads=8, head_dim=128, norm_eps=1e-5) if "intermediate_size" not in row.keys),
        same("intermediate_size_mlp", "intermediate_size", 16384, lambda model: model.feed_forward_size),
        max_positions(131072),
        rope(500_000.0),
        Row(
            ("no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size"),
            _read_llama4_layers,
            _write_llama4_layers,
        ),
        Row(("attn_temperature_tuning", "floor_scale", "attn_scale"), _read_llama4_scale, _write_llama4_scale),
        attention_bias(),
        Row(
            ("use_qk_norm",),
            lambda config: {"qk_norm": "without_gain" if config.get("use_qk_norm", True) else False},
            lambda model: {"use_qk_norm": model.qk_norm == "without_gain"},
        ),
        expert_keys(
            {
                "num_local_experts": "num_experts",
                "router_aux_loss_coef": "router_aux_loss_coef",
                "interleave_moe_layer_step": "decoder_sparse_step",
            },
            _read_llama4_experts,
            scoring_func="sigmoid",
            norm_topk_prob=False,
            weight_inputs=True,
            n_shared_experts=1,
        ),
        Row(
            ("intermediate_size", "moe_layers"),
            lambda config: {},
            lambda model: {"intermediate_size": model.expert_size},
        ),
        fixed("for_llm_compressor", False),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=(
        *ENDS,
        *(row._replace(pairs=row.path.startswith(_ROTATED)) for row in ATTENTION),
        *NORMS,
        *(
            Tensor(f"layers/mlp/{name}/kernel", LAYER + f"feed_forward.{name}.weight", ((1,), (0,)))
            for name in _PROJECTIONS
        ),
        Tensor("layers/mlp/router/kernel", LAYER + "feed_forward.router.weight", ((1,), (0,))),
        _llama4_experts("gate_proj", "gate_up_proj", joined=2),
        _llama4_experts("up_proj", "gate_up_proj", joined=2),
        _llama4_experts("down_proj", "down_proj"),
        *(
            Tensor(
                f"layers/mlp/shared_experts/{name}/kernel",
                LAYER + f"feed_forward.shared_expert.{name}.weight",
                ((1,), (0,)),
            )
            for name in _PROJECTIONS
        ),
    ),
    nested=NESTED,
    ignored=TRAINING_KEYS,
    buffers=r".*rotary_emb\.inv_freq|(model\.)?(vision_model|multi_modal_projector)\..*",
)

LLAMA4_MULTIMODAL = Multimodal(
    LLAMA4,
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_local_experts": 16,
    },
    ignored=frozenset(["vision_config", "image_token_index", "boi_token_index", "eoi_token_index"]),
)
