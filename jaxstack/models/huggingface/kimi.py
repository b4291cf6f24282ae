"""Hugging Face format of Kimi Linear (Moonshot AI 2025, arXiv:2510.26692): three layers of Kimi Delta Attention to one
of latent attention without positions, and the mixtures of DeepSeek V3.
"""

from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, Row, always, find, fixed, repeated_part, same
from jaxstack.models.huggingface.deepseek import LATENT_ATTENTION, LATENT_KEYS, latent_shape, read_dense_layers
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import LAYER, TENSORS
from jaxstack.models.huggingface.mixture import TRAINING_KEYS, expert_keys, expert_tensors
from jaxstack.models.huggingface.qwen import delta_tensors
from jaxstack.models.huggingface.tensors import Tensor

_LINEAR = {
    "num_heads": ("linear_num_heads", ("num_heads", "num_key_heads"), 32),
    "head_dim": ("linear_head_dim", ("head_dim", "key_head_dim"), 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", ("conv_kernel",), 4),
}
"""Key of `linear_attn_config` -> the same of transformers, fields of `KimiDelta`, default."""
_TYPES = {"linear_attention": "kda", "full_attention": "full_attention"}


def _read_types(config: Keys, count: int) -> list[str]:
    """Return the type of each layer; the lists of the releases count layers from 1."""
    if (named := config.get("layer_types")) is not None:
        return list(named)
    lists = config.get("linear_attn_config") or {}
    full, linear = (set(lists.get(key) or ()) for key in ("full_attn_layers", "kda_layers"))
    if full & linear:
        return []
    known = {**dict.fromkeys(full, "full_attention"), **dict.fromkeys(linear, "linear_attention")}
    return [known[number] for number in range(1, count + 1) if number in known]


def _read_layers(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    named = _read_types(config, count)
    if len(named) != count or not set(named) <= set(_TYPES):
        raise ConfigError(
            f"config.json: linear_attn_config must have each of the layers 1 to {count} in kda_layers or in "
            "full_attn_layers, or layer_types linear_attention or full_attention for each."
        )
    lists = config.get("linear_attn_config") or {}
    kda = {}
    for key, (theirs, fields, default) in _LINEAR.items():
        kda |= dict.fromkeys(fields, lists.get(key, config.get(theirs, default)))
    return {"layer_types": repeated_part([_TYPES[name] for name in named]), "kda": kda}


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    linear = [getattr(layer.mixer, "name", None) == "kda" for layer in model.layers()]
    lists = {key: getattr(model.kda, fields[0]) for key, (_, fields, _) in _LINEAR.items()}
    for key, wanted in (("kda_layers", True), ("full_attn_layers", False)):
        lists[key] = [number for number, kind in enumerate(linear, 1) if kind == wanted]
    return {"linear_attn_config": lists}


_LAYERS = Row(
    ("linear_attn_config", "layer_types", *(theirs for theirs, _, _ in _LINEAR.values())), _read_layers, _write_layers
)
# Nothing rotates, so how the channels would be paired has no meaning.
_ATTENTION_KEYS = LATENT_KEYS._replace(
    write=lambda model: {key: x for key, x in LATENT_KEYS.write(model).items() if key != "rope_interleave"}
)

_EXPERTS = {
    "num_experts": "num_experts",
    "num_shared_experts": "n_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_expert_group": "n_group",
    "topk_group": "topk_group",
    "moe_renormalize": "norm_topk_prob",
    "first_k_dense_replace": "first_k_dense_replace",
}
_DEFAULTS = {"n_shared_experts": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, "n_group": 1}
_MIXTURE_KEYS = expert_keys(
    _EXPERTS,
    lambda config: read_dense_layers(config, lambda config: {"num_experts": find(config, "num_experts")}),
    scoring_func="sigmoid",
    balance_bias=True,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    **_DEFAULTS,
)


def _read_experts(config: Keys) -> dict[str, Any]:
    moe = _MIXTURE_KEYS.read(config)["moe"]
    return {"moe": {**moe, "num_experts_per_tok": config.get("num_experts_per_token", 8)}}


def _write_experts(model: ModelConfig) -> dict[str, Any]:
    keys = _MIXTURE_KEYS.write(model)
    return {**keys, "num_experts_per_token": keys.pop("num_experts_per_tok")}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


_GATES = (
    *(
        Tensor(f"layers/attention/{name}_a_proj/kernel", LAYER + f"self_attn.{name}_a_proj.weight", ((1,), (0,)))
        for name in "fg"
    ),
    *(
        Tensor(f"layers/attention/{name}_b_proj/kernel", LAYER + f"self_attn.{name}_b_proj.weight", ((1, 2), (0,)))
        for name in "fg"
    ),
    Tensor("layers/attention/a_log", LAYER + "self_attn.A_log", ((), (), (0,), ())),
    Tensor("layers/attention/dt_bias", LAYER + "self_attn.dt_bias", ((0, 1),)),
)

KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    rows=(
        *latent_shape(norm_eps=1e-5, attention=_ATTENTION_KEYS),
        same("model_max_length", "max_position_embeddings", 1048576),
        _LAYERS,
        Row((*_MIXTURE_KEYS.keys, "num_experts_per_token", "mlp_layer_types"), _read_experts, _write_experts),
        fixed("mla_use_nope", True),
        fixed("moe_router_activation_func", "sigmoid"),
        fixed("use_grouped_topk", True),
        fixed("num_nextn_predict_layers", 0),
        # The default of transformers is an id of Kimi's own tokenizer, which it looks up in the embedding.
        Row((), lambda config: {}, lambda model: {"pad_token_id": None}),
        always(positions="none"),
    ),
    tensors=(
        *TENSORS,
        *LATENT_ATTENTION,
        *delta_tensors("self_attn."),
        *_GATES,
        *expert_tensors(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts",
            {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        ),
        Tensor("layers/mlp/router/balance_bias", LAYER + "block_sparse_moe.gate.e_score_correction_bias", ((0,),)),
        *(
            Tensor(
                f"layers/mlp/shared_experts/{name}/kernel",
                LAYER + f"block_sparse_moe.shared_experts.{name}.weight",
                ((1,), (0,)),
            )
            for name in _PROJECTIONS
        ),
    ),
    # transformers writes dense layers by the names of mixtures.
    alternatives=tuple(
        Tensor(f"layers/mlp/{name}/kernel", LAYER + f"block_sparse_moe.{name}.weight", ((1,), (0,)))
        for name in _PROJECTIONS
    ),
    # Of rotary positions, which no layer has.
    ignored=TRAINING_KEYS | {"rope_theta", "rope_scaling", "rope_parameters"},
)
