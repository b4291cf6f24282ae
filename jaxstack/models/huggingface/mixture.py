"""Hugging Face formats of mixture-of-experts families: Mixtral (Jiang et al. 2024), Qwen 3 MoE and gpt-oss (2025).

Mixtral and Qwen store one tensor per expert; gpt-oss one of all experts, with gates and values in turn.
"""

from collections.abc import Callable
from typing import Any

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
    same,
    windows,
)
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import LAYER, TENSORS, attention_bias, max_positions, shape
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
