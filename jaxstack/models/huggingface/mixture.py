"""Hugging Face formats of two mixture-of-experts families: Mixtral (Jiang et al. 2024) and Qwen 3 MoE (2025).

Both store one tensor per expert.
"""

from collections.abc import Callable
from typing import Any

from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, Row, activation, always, find, fixed, rope, same, windows
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import LAYER, TENSORS, attention_bias, max_positions, shape
from jaxstack.models.huggingface.tensors import Tensor
from jaxstack.models.moe.router import MoEConfig


def _experts(keys: dict[str, str], read: Callable[[Keys], dict[str, Any]], **constant: Any) -> Row:
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


def _tensors(router: str, experts: str, names: dict[str, str]) -> tuple[Tensor, ...]:
    return (
        Tensor("layers/mlp/router/kernel", LAYER + router, ((1,), (0,))),
        *(
            Tensor(f"layers/mlp/{ours}/kernel", LAYER + experts + f".{{expert}}.{theirs}.weight", ((1,), (0,)))
            for ours, theirs in names.items()
        ),
    )


_TRAINING = frozenset(["output_router_logits", "router_jitter_noise"])

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
        _experts(
            {"num_local_experts": "num_experts", "router_aux_loss_coef": "router_aux_loss_coef"},
            lambda config: _count(config, 2),
            norm_topk_prob=True,
        ),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=(
        *TENSORS,
        *_tensors(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts",
            {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        ),
    ),
    ignored=_TRAINING,
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rows=(
        *shape(kv_heads=4),
        max_positions(32768),
        rope(),
        attention_bias(),
        _experts(
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
        *_tensors("mlp.gate.weight", "mlp.experts", {n: n for n in ("gate_proj", "up_proj", "down_proj")}),
    ),
    ignored=_TRAINING | {"sliding_window", "max_window_layers"},  # settings of windows, which are not used
)
