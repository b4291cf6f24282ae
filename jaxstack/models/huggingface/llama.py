"""Hugging Face formats of Llama 2 and 3 (Touvron et al. 2023, Llama Team 2024) and of models that differ in a few keys:
Mistral (Jiang et al. 2023), SmolLM3 (Bakouch et al. 2025), Granite 3 (Granite Team 2024), Phi-3 and 4 (Microsoft 2024).

Other families reuse the tables. Queries and keys need no permutation: both sides pair the halves of a head for rotary
positions.
"""

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
    repeated_types,
    rope,
    same,
    windows,
)
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.tensors import Tensor

LAYER = "model.layers.{layer}."
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

ATTENTION = (
    *(Tensor(f"layers/attention/{n}/kernel", LAYER + f"self_attn.{n}.weight", ((1, 2), (0,))) for n in _PROJECTIONS),
    *(Tensor(f"layers/attention/{n}/bias", LAYER + f"self_attn.{n}.bias", ((0, 1),)) for n in _PROJECTIONS),
    Tensor("layers/attention/o_proj/kernel", LAYER + "self_attn.o_proj.weight", ((2,), (0, 1))),
    Tensor("layers/attention/o_proj/bias", LAYER + "self_attn.o_proj.bias", ((0,),)),
    Tensor("layers/attention/q_norm/scale", LAYER + "self_attn.q_norm.weight", ((0,),)),
    Tensor("layers/attention/k_norm/scale", LAYER + "self_attn.k_norm.weight", ((0,),)),
)
MLP = tuple(
    row
    for name in ("gate_proj", "up_proj", "down_proj")
    for row in (
        Tensor(f"layers/mlp/{name}/kernel", LAYER + f"mlp.{name}.weight", ((1,), (0,))),
        Tensor(f"layers/mlp/{name}/bias", LAYER + f"mlp.{name}.bias", ((0,),)),
    )
)
NORMS = (
    Tensor("layers/attention_norm/scale", LAYER + "input_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_norm/scale", LAYER + "post_attention_layernorm.weight", ((0,),)),
)
ENDS = (
    Tensor("embedding/table", "model.embed_tokens.weight", ((0,), (1,))),
    Tensor("final_norm/scale", "model.norm.weight", ((0,),)),
    Tensor("head", "lm_head.weight", ((1,), (0,))),
)
TENSORS = (*ENDS, *ATTENTION, *NORMS, *MLP)


def max_positions(default: int) -> Row:
    """Return the `Row` that converts config.json's `max_position_embeddings`; `default` replaces a missing limit."""
    key = "max_position_embeddings"
    return same(key, key, default, lambda model: model.max_position_embeddings or default)


def shape(
    kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False, norm_eps: float = 1e-6
) -> tuple[Row, ...]:
    """Return the `Row`s that convert config.json's sizes, norm epsilon and embedding tying in Llama-like families."""
    return (
        same("vocab_size", "vocab_size"),
        same("hidden_size", "hidden_size"),
        same("num_hidden_layers", "num_layers"),
        same("num_attention_heads", "num_heads"),
        same("num_key_value_heads", "num_kv_heads", kv_heads, lambda model: model.kv_heads),
        same("head_dim", "head_dim", head_dim, lambda model: model.width_per_head),
        same("intermediate_size", "intermediate_size", value=lambda model: model.feed_forward_size),
        same("rms_norm_eps", "norm_eps", norm_eps),
        same("initializer_range", "initializer_range", 0.02),
        same("tie_word_embeddings", "tie_word_embeddings", tied),
        fixed("is_encoder_decoder", False),
    )


def attention_bias(default: bool = False) -> Row:
    """Return the `Row` that converts config.json's `attention_bias` (biases in all four attention projections)."""
    return Row(
        ("attention_bias",),
        lambda config: dict.fromkeys(("qkv_bias", "output_bias"), config.get("attention_bias", default)),
        lambda model: {"attention_bias": model.qkv_bias},
    )


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    rows=(
        *shape(),
        max_positions(2048),
        rope(),
        attention_bias(),
        same("mlp_bias", "mlp_bias", False),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
        fixed("rope_interleaved", False),
    ),
    tensors=TENSORS,
    ignored=frozenset(["is_llama_config"]),
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    rows=(
        *shape(kv_heads=8),
        max_positions(131072),
        rope(),
        windows(
            (), lambda config, layers: [True] * layers, lambda model: {"sliding_window": min(model.windows(), key=bool)}
        ),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=TENSORS,
)


def _read_no_rope(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    types = config.get("layer_types")
    if types is not None and set(types) != {"full_attention"}:
        raise ConfigError(f"config.json: layer_types {sorted(set(types))} are not supported; only full_attention is.")
    if len(rotates) < count or not set(rotates) <= {0, 1}:
        raise ConfigError(f"config.json: no_rope_layers must have a 0 or 1 for each of {count} layers.")
    return {"layer_types": repeated_types([not kind for kind in rotates[:count]], "full_attention_no_rope")}


def _write_no_rope(model: ModelConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(layer.rotation is not None) for layer in model.layers()],
        "layer_types": ["full_attention"] * model.num_layers,
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    rows=(
        *shape(kv_heads=4, tied=True),
        max_positions(32768),
        rope(2_000_000.0),
        Row(("no_rope_layers", "no_rope_layer_interval", "layer_types"), _read_no_rope, _write_no_rope),
        fixed("use_sliding_window", False),
        # The default of transformers is an id of SmolLM3's own tokenizer, which it looks up in the embedding.
        Row((), lambda config: {}, lambda model: {"pad_token_id": None}),
        attention_bias(),
        same("mlp_bias", "mlp_bias", False),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=TENSORS,
    ignored=frozenset(["sliding_window", "max_window_layers"]),  # of windows that are off
)


def _read_attention_multiplier(config: Keys) -> dict[str, Any]:
    factor = float(config.get("attention_multiplier", 1.0))
    if not factor > 0:
        raise ConfigError(f"config.json: attention_multiplier must be positive; found {factor}.")
    return {"query_pre_attn_scalar": factor**-2}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    rows=(
        *shape(),
        max_positions(2048),
        rope(),
        attention_bias(),
        same("mlp_bias", "mlp_bias", False),
        activation("hidden_act", "silu"),
        Row(
            ("attention_multiplier",),
            _read_attention_multiplier,
            lambda model: {"attention_multiplier": float(f"{model.attention_scale:.12g}")},
        ),
        Row(
            ("embedding_multiplier",),
            lambda config: {"scale_embeddings": float(config.get("embedding_multiplier", 1.0))},
            lambda model: {"embedding_multiplier": model.embedding_factor},
        ),
        Row(
            ("residual_multiplier",),
            lambda config: {"residual_multiplier": float(config.get("residual_multiplier", 1.0))},
            lambda model: {"residual_multiplier": model.residual_multiplier},
        ),
        Row(
            ("logits_scaling",),
            lambda config: {"logits_scaling": float(config.get("logits_scaling", 1.0))},
            lambda model: {"logits_scaling": model.logits_scaling},
        ),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=TENSORS,
)


_PHI_ROPE = rope(partial=1.0)
_ORIGINAL = "original_max_position_embeddings"


def _read_phi_rope(config: Keys) -> dict[str, Any]:
    fields = _PHI_ROPE.read({_ORIGINAL: 4096, **config})
    scaling = fields["rope_scaling"]
    if scaling and scaling["rope_type"] != "longrope":
        raise ConfigError(
            f"config.json: rope_scaling: rope_type {scaling['rope_type']!r} is not supported; only longrope is."
        )
    return fields


def _write_phi_rope(model: ModelConfig) -> dict[str, Any]:
    keys = _PHI_ROPE.write(model)
    scaling = keys["rope_scaling"]
    if scaling and scaling["rope_type"] == "longrope":
        keys[_ORIGINAL] = scaling.pop(_ORIGINAL)
        # Phi's own code takes `type` and the two lists only.
        scaling["type"] = scaling.pop("rope_type")
        if scaling["factor"] == (model.max_position_embeddings or 0) / keys[_ORIGINAL]:
            del scaling["factor"]
    return keys


def _within_context(config: Keys, layers: int) -> list[bool]:
    """Return that all layers have a window, unless it spans the whole context."""
    return [(config.get("sliding_window") or 0) < config.get("max_position_embeddings", 4096)] * layers


def _joined(paths: tuple[str, ...], name: str) -> tuple[Tensor, ...]:
    """Return the rows of projections whose outputs follow each other in one tensor."""
    rows = {row.path: row for row in TENSORS}
    found = [rows[f"layers/{path}/kernel"] for path in paths]
    return tuple(row._replace(name=LAYER + name, joined=0) for row in found)


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    rows=(
        *shape(norm_eps=1e-5),
        max_positions(4096),
        Row((*_PHI_ROPE.keys, _ORIGINAL), _read_phi_rope, _write_phi_rope),
        windows(
            (),
            _within_context,
            lambda model: {"sliding_window": min(model.windows(), key=bool)},
            default=None,
        ),
        # The default of transformers is an id of Phi-3's own tokenizer.
        Row((), lambda config: {}, lambda model: {"pad_token_id": None}),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
        fixed("lm_head_bias", False),
        fixed("full_attn_mod", 1),
        fixed("interpolate_factor", 1),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated"),
    ),
    tensors=(
        *ENDS,
        *_joined(tuple(f"attention/{name}" for name in _PROJECTIONS), "self_attn.qkv_proj.weight"),
        *(row for row in ATTENTION if row.path == "layers/attention/o_proj/kernel"),
        *NORMS,
        *_joined(("mlp/gate_proj", "mlp/up_proj"), "mlp.gate_up_proj.weight"),
        *(row for row in MLP if row.path == "layers/mlp/down_proj/kernel"),
    ),
)
