"""Hugging Face formats of DeepSeek V2, V3, R1, V3.1 and V3.2 (2024, 2025) and Kimi K2 (2025), with latent attention and
mixtures, and of GLM-4.5 to 4.7 (Zeng et al. 2025, arXiv:2508.06471), with the same mixtures.

Layers for multi-token prediction follow the last layer in the files, each with copies of the embedding and the head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, Row, activation, always, find, fixed, rope, same
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import LAYER, TENSORS, max_positions, shape
from jaxstack.models.huggingface.mixture import TRAINING_KEYS, expert_keys, expert_tensors
from jaxstack.models.huggingface.tensors import Tensor

_WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_HEADS = ("rope_interleave", "num_key_value_heads", "head_dim", "qk_head_dim")


def _read_attention(config: Keys) -> dict[str, Any]:
    kind = {key: config.get(key) if key == "q_lora_rank" else find(config, key) for key in _WIDTHS}
    kind |= {"name": "latent", "rope_interleave": config.get("rope_interleave", True)}
    width = find(config, "qk_nope_head_dim") + find(config, "qk_rope_head_dim")
    return {"attention": kind, "head_dim": width, "num_kv_heads": find(config, "num_attention_heads")}


def _write_attention(model: ModelConfig) -> dict[str, Any]:
    kind = model.attention if isinstance(model.attention, LatentAttention) else LatentAttention()
    keys = {key: getattr(kind, key) for key in (*_WIDTHS, "rope_interleave")}
    return {**keys, "num_key_value_heads": model.num_heads}


LATENT_KEYS = Row((*_WIDTHS, *_HEADS), _read_attention, _write_attention)
_INDEX = ("index_topk", "index_n_heads", "index_head_dim")


def _read_sparse_attention(config: Keys) -> dict[str, Any]:
    fields = _read_attention(config)
    index = {key: config.get(key) for key in _INDEX if config.get(key) is not None}
    return {**fields, "attention": {**fields["attention"], "name": "sparse_latent", **index}}


def _write_sparse_attention(model: ModelConfig) -> dict[str, Any]:
    kind = model.attention
    index = kind if isinstance(kind, SparseLatentAttention) else SparseLatentAttention()
    return {**_write_attention(model), **{key: getattr(index, key) for key in _INDEX}}


def latent_shape(norm_eps: float = 1e-6, attention: Row = LATENT_KEYS) -> tuple[Row, ...]:
    """Return the `Row`s that convert config.json's sizes of a model with latent attention, read by `attention`."""
    return (
        same("vocab_size", "vocab_size"),
        same("hidden_size", "hidden_size"),
        same("num_hidden_layers", "num_layers"),
        same("num_attention_heads", "num_heads"),
        same("intermediate_size", "intermediate_size", value=lambda model: model.feed_forward_size),
        same("rms_norm_eps", "norm_eps", norm_eps),
        same("initializer_range", "initializer_range", 0.02),
        same("tie_word_embeddings", "tie_word_embeddings", False),
        attention,
        fixed("attention_bias", False),
        fixed("moe_layer_freq", 1),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    )


_EXPERTS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "n_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "routed_scaling_factor",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "norm_topk_prob": "norm_topk_prob",
    "first_k_dense_replace": "first_k_dense_replace",
}
LATENT_ATTENTION = (
    Tensor("layers/attention/q_a_proj/kernel", LAYER + "self_attn.q_a_proj.weight", ((1,), (0,))),
    Tensor("layers/attention/q_a_norm/scale", LAYER + "self_attn.q_a_layernorm.weight", ((0,),)),
    Tensor("layers/attention/q_b_proj/kernel", LAYER + "self_attn.q_b_proj.weight", ((1, 2), (0,))),
    Tensor("layers/attention/kv_a_proj/kernel", LAYER + "self_attn.kv_a_proj_with_mqa.weight", ((1,), (0,))),
    Tensor("layers/attention/kv_a_norm/scale", LAYER + "self_attn.kv_a_layernorm.weight", ((0,),)),
    Tensor("layers/attention/kv_b_proj/kernel", LAYER + "self_attn.kv_b_proj.weight", ((1, 2), (0,))),
)
_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTURE = (
    *expert_tensors("mlp.gate.weight", "mlp.experts", {name: name for name in _NAMES}),
    Tensor("layers/mlp/router/balance_bias", LAYER + "mlp.gate.e_score_correction_bias", ((0,),)),
    *(
        Tensor(f"layers/mlp/shared_experts/{name}/kernel", LAYER + f"mlp.shared_experts.{name}.weight", ((1,), (0,)))
        for name in _NAMES
    ),
)
_TENSORS = (*TENSORS, *LATENT_ATTENTION, *_MIXTURE)
_TRAINING = TRAINING_KEYS | {"aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp"}

_PREDICTION_LAYERS = same("num_nextn_predict_layers", "num_nextn_predict_layers", 0)
_PREDICTION = (
    Tensor("layers/embedding_norm/scale", LAYER + "enorm.weight", ((0,),)),
    Tensor("layers/hidden_norm/scale", LAYER + "hnorm.weight", ((0,),)),
    Tensor("layers/projection/kernel", LAYER + "eh_proj.weight", ((1,), (0,))),
    Tensor("layers/final_norm/scale", LAYER + "shared_head.norm.weight", ((0,),)),
)
_COPIES = (
    Tensor("embedding/table", LAYER + "embed_tokens.weight", ((0,), (1,))),
    Tensor("head", LAYER + "shared_head.head.weight", ((1,), (0,))),
)


def _chosen(config: Keys) -> dict[str, Any]:
    """Return the fields of `MoEConfig` whose keys have other defaults."""
    return {
        "num_experts_per_tok": find(config, "num_experts_per_tok"),
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "n_shared_experts": config.get("n_shared_experts") or 0,
        "router_aux_loss_coef": config.get("aux_loss_alpha", 1e-4),
    }


def _v2_chosen(config: Keys) -> dict[str, Any]:
    """Return the same fields with the weight of the balance loss that transformers takes for DeepSeek V2."""
    return _chosen({"aux_loss_alpha": 0.001, **config})


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rows=(
        *latent_shape(),
        max_positions(2048),
        rope(),
        expert_keys(_EXPERTS, _v2_chosen, scoring_func="softmax"),
        fixed("scoring_func", "softmax"),
        fixed("topk_method", "greedy", "group_limited_greedy"),
        fixed("mlp_bias", False),
    ),
    tensors=_TENSORS,
    ignored=_TRAINING | {"num_nextn_predict_layers"},
)


def _v3_rows(attention: Row = LATENT_KEYS, chosen: Callable[[Keys], dict[str, Any]] = _chosen) -> tuple[Row, ...]:
    return (
        *latent_shape(attention=attention),
        max_positions(4096),
        rope(),
        expert_keys(_EXPERTS, chosen, scoring_func="sigmoid", balance_bias=True),
        _PREDICTION_LAYERS,
        fixed("scoring_func", "sigmoid"),
        fixed("topk_method", "noaux_tc"),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows=_v3_rows(),
    tensors=(*_TENSORS, *_PREDICTION),
    copies=_COPIES,
    ignored=_TRAINING,
)

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")


def _glm_chosen(config: Keys) -> dict[str, Any]:
    return {
        **_chosen(config),
        "n_shared_experts": config.get("n_shared_experts", 1),
        "first_k_dense_replace": config.get("first_k_dense_replace", 1),
    }


_GLM_TRAINING = _TRAINING | {"num_mtp_layers"}

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    rows=(
        *shape(kv_heads=8, norm_eps=1e-5),
        max_positions(131072),
        rope(partial=0.5),
        same("attention_bias", "qkv_bias", False),
        same("use_qk_norm", "qk_norm", False, lambda model: model.qk_norm is True),
        expert_keys(_EXPERTS, _glm_chosen, scoring_func="sigmoid", balance_bias=True),
        _PREDICTION_LAYERS,
        fixed("scoring_func", "sigmoid"),
        fixed("topk_method", "noaux_tc"),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=(*TENSORS, *_MIXTURE, *_PREDICTION),
    copies=_COPIES,
    ignored=_GLM_TRAINING,
)


def read_dense_layers(config: Keys, chosen: Callable[[Keys], dict[str, Any]] = _glm_chosen) -> dict[str, Any]:
    """Return the fields of `MoEConfig`, with the number of dense layers from either of two keys."""
    fields = chosen(config)
    types = config.get("mlp_layer_types")
    if types is None:
        return fields
    dense = list(types).count("dense")
    if list(types) != ["dense"] * dense + ["sparse"] * (find(config, "num_hidden_layers") - dense):
        raise ConfigError("config.json: mlp_layer_types must have one entry a layer, first all dense, then all sparse.")
    if config.get("first_k_dense_replace", dense) != dense:
        raise ConfigError(
            f"config.json: first_k_dense_replace ({config['first_k_dense_replace']}) is not the number of dense layers "
            f"in mlp_layer_types ({dense}); correct one of them."
        )
    return {**fields, "first_k_dense_replace": dense}


def _write_dense_layers(model: ModelConfig) -> dict[str, Any]:
    kinds = {"dense": "dense", "experts": "sparse"}
    return {"mlp_layer_types": [kinds.get(layer.feed_forward or "", "none") for layer in model.layers()]}


_DENSE_LAYERS = Row(("mlp_layer_types",), lambda config: {}, _write_dense_layers)

GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    rows=(
        *latent_shape(norm_eps=1e-5),
        max_positions(202752),
        rope(),
        fixed("partial_rotary_factor", 1.0),
        expert_keys(_EXPERTS, read_dense_layers, scoring_func="sigmoid", balance_bias=True),
        _DENSE_LAYERS,
        _PREDICTION_LAYERS,
        fixed("scoring_func", "sigmoid"),
        fixed("topk_method", "noaux_tc"),
    ),
    tensors=(*_TENSORS, *_PREDICTION),
    copies=_COPIES,
    ignored=_GLM_TRAINING,
)


def _check_layer_types(config: Keys) -> dict[str, Any]:
    """Check that the indexer chooses in all layers; as no field says so, none is returned."""
    if set(types := config.get("layer_types") or ["indexed_attention"]) != {"indexed_attention"}:
        raise ConfigError(f"config.json: layer_types of a deepseek_v32 must all be indexed_attention; found {types}.")
    return {}


_INDEXER = (
    Tensor("layers/attention/indexer/q_proj/kernel", LAYER + "self_attn.indexer.wq_b.weight", ((1,), (0,))),
    Tensor("layers/attention/indexer/k_proj/kernel", LAYER + "self_attn.indexer.wk.weight", ((1,), (0,))),
    Tensor("layers/attention/indexer/k_norm/scale", LAYER + "self_attn.indexer.k_norm.weight", ((0,),)),
    Tensor("layers/attention/indexer/k_norm/bias", LAYER + "self_attn.indexer.k_norm.bias", ((0,),)),
    Tensor(
        "layers/attention/indexer/weights_proj/kernel", LAYER + "self_attn.indexer.weights_proj.weight", ((1,), (0,))
    ),
)
_SPARSE_KEYS = Row((*_WIDTHS, *_HEADS, *_INDEX), _read_sparse_attention, _write_sparse_attention)

DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    rows=(
        *_v3_rows(_SPARSE_KEYS, lambda config: read_dense_layers(config, _chosen)),
        _DENSE_LAYERS,
        Row(("layer_types",), _check_layer_types, lambda model: {}),
        fixed("mlp_bias", False),
    ),
    tensors=(*_TENSORS, *_PREDICTION, *_INDEXER),
    copies=_COPIES,
    ignored=_TRAINING,
)
