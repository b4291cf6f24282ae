"""Hugging Face formats of Qwen 2.5 (Qwen Team 2024; query, key, value biases) and Qwen 3 (2025; query-key norm), and of
Qwen3-Next (2025) and Qwen 3.5 (2026), which have three gated DeltaNet layers to one of gated attention.
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
    fixed,
    layer_types,
    repeated_part,
    rope,
    windows,
)
from jaxstack.models.huggingface.family import NESTED, Family, Multimodal
from jaxstack.models.huggingface.llama import ENDS, LAYER, NORMS, TENSORS, attention_bias, max_positions, shape
from jaxstack.models.huggingface.mixture import TRAINING_KEYS, expert_keys, expert_tensors
from jaxstack.models.huggingface.tensors import Tensor


def _late_windows(config: Keys, layers: int) -> Sequence[bool]:
    """Return per layer True if it has sliding-window attention: layers from `max_window_layers` on, if enabled."""
    first = config.get("max_window_layers", 28)
    return [bool(config.get("use_sliding_window", False)) and layer >= first for layer in range(layers)]


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    keys = layer_types(model)
    first = next((i for i, window in enumerate(model.windows()) if window), model.num_layers)
    return {**keys, "use_sliding_window": keys["sliding_window"] is not None, "max_window_layers": first}


WINDOWS = windows(("use_sliding_window", "max_window_layers", "layer_types"), _late_windows, _write_windows)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    rows=(
        *shape(kv_heads=32),
        max_positions(32768),
        rope(),
        WINDOWS,
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", qkv_bias=True),
        fixed("use_mrope", False),
    ),
    tensors=TENSORS,
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    rows=(
        *shape(kv_heads=32, head_dim=128),
        max_positions(32768),
        rope(),
        attention_bias(),
        WINDOWS,
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", qk_norm=True),
    ),
    tensors=TENSORS,
)


_DELTA = {
    "linear_num_key_heads": ("num_key_heads", 16),
    "linear_num_value_heads": ("num_heads", 32),
    "linear_key_head_dim": ("key_head_dim", 128),
    "linear_value_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("conv_kernel", 4),
}
"""Key of config.json -> field of `GatedDelta`, default."""
_DELTA_GATE = fixed("output_gate_type", "swish", "silu", None)
"""Gate of the norm of gated DeltaNet; that of attention is always a sigmoid."""
_TYPES = {"linear_attention": "delta", "full_attention": "full_attention"}


def _read_types(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    interval = config.get("full_attention_interval", 4)
    default = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(count)]
    named = config.get("layer_types") or default
    if len(named) != count or not set(named) <= set(_TYPES):
        raise ConfigError(
            f"config.json: layer_types must have an entry for each of {count} layers, linear_attention or "
            f"full_attention; found {len(named)} of {', '.join(sorted(set(map(str, named))))}."
        )
    return {"layer_types": repeated_part([_TYPES[name] for name in named])}


def _write_types(model: ModelConfig) -> dict[str, Any]:
    linear = [getattr(layer.mixer, "name", None) == "delta" for layer in model.layers()]
    return {"layer_types": ["linear_attention" if kind else "full_attention" for kind in linear]}


_ROPE = rope(partial=0.25)
_THREE_AXES = ("mrope_section", "mrope_interleaved")


def _read_rope(config: Keys) -> dict[str, Any]:
    """Read rotary positions; those of three axes, for images, are the same as plain ones for text."""
    said = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    plain = {key: {k: v for k, v in value.items() if k not in _THREE_AXES} for key, value in said.items()}
    return _ROPE.read({**config, **plain})


_HYBRID = (
    max_positions(32768),
    Row(_ROPE.keys, _read_rope, _ROPE.write),
    attention_bias(),
    Row(("layer_types", "full_attention_interval"), _read_types, _write_types),
    Row(
        tuple(_DELTA),
        lambda config: {"delta": {ours: find(config, key, default) for key, (ours, default) in _DELTA.items()}},
        lambda model: {key: getattr(model.delta, ours) for key, (ours, _) in _DELTA.items()},
    ),
    activation("hidden_act", "silu"),
    always(norm="rms_norm_unit_offset", mlp="gated", qk_norm=True, attention={"name": "gated"}),
)


def _read_experts(config: Keys) -> dict[str, Any]:
    width = find(config, "moe_intermediate_size", 512)
    shared = find(config, "shared_expert_intermediate_size", 512)
    if not width or not shared or shared % width:
        raise ConfigError(
            f"config.json: shared_expert_intermediate_size ({shared}) must be a multiple of moe_intermediate_size "
            f"({width})."
        )
    number = find(config, "num_experts")
    return {"num_experts": number, "moe_intermediate_size": width, "n_shared_experts": shared // width}


def _write_widths(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe.n_shared_experts if model.moe else 0
    return {"moe_intermediate_size": model.expert_size, "shared_expert_intermediate_size": shared * model.expert_size}


def _experts(chosen: int, *keys: str) -> tuple[Row, ...]:
    """Return the rows of a mixture; `chosen` is the default number of experts of a token."""
    same = {key: key for key in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef", *keys)}
    constant = {"norm_topk_prob": True, "num_experts_per_tok": chosen, "shared_expert_gate": True}
    return (
        expert_keys(same, _read_experts, **constant),
        Row(("moe_intermediate_size", "shared_expert_intermediate_size"), lambda config: {}, _write_widths),
    )


def _key_heads(model: ModelConfig) -> int:
    return model.delta.num_key_heads


def _query_heads(model: ModelConfig) -> int:
    return model.num_heads


def _joined(names: Sequence[str], theirs: str, **more: Any) -> tuple[Tensor, ...]:
    """Return the rows of projections to heads, whose outputs are joined in one tensor."""
    order = ((1, 2), (0,))
    return tuple(Tensor(f"layers/attention/{n}/kernel", LAYER + theirs, order, 0, **more) for n in names)


def delta_tensors(mixer: str) -> tuple[Tensor, ...]:
    """Return the rows that layers of delta rules share, each projection and convolution having a tensor of its own.

    Args:
      mixer: beginning of the names within a layer.
    """
    at = "layers/attention/"
    theirs = LAYER + mixer
    heads = ((1, 2), (0,))
    return (
        *(Tensor(f"{at}in_proj_{name}/kernel", f"{theirs}{name}_proj.weight", heads) for name in "qkv"),
        *(Tensor(f"{at}{name}_conv/taps", f"{theirs}{name}_conv1d.weight", ((1, 2), (), (0,))) for name in "qkv"),
        Tensor(f"{at}in_proj_b/kernel", f"{theirs}b_proj.weight", ((1,), (0,))),
        Tensor(f"{at}norm/scale", f"{theirs}o_norm.weight", ((0,),)),
        Tensor(f"{at}out_proj/kernel", f"{theirs}o_proj.weight", ((2,), (0, 1))),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_HYBRID_TENSORS = (
    *ENDS,
    *_joined(("q_proj", "gate_proj"), "self_attn.q_proj.weight", groups=_query_heads),
    *(row for row in TENSORS if "self_attn" in row.name and "q_proj" not in row.name),
    *NORMS,
    *(
        Tensor(f"layers/attention/{n}_conv/taps", LAYER + "linear_attn.conv1d.weight", ((1, 2), (), (0,)), 0)
        for n in ("q", "k", "v")
    ),
    Tensor("layers/attention/a_log", LAYER + "linear_attn.A_log", ((0,),)),
    Tensor("layers/attention/dt_bias", LAYER + "linear_attn.dt_bias", ((0,),)),
    Tensor("layers/attention/norm/scale", LAYER + "linear_attn.norm.weight", ((0,),)),
    Tensor("layers/attention/out_proj/kernel", LAYER + "linear_attn.out_proj.weight", ((2,), (0, 1))),
)

_DENSE = tuple(row for row in TENSORS if ".mlp." in row.name)
_MIXTURE = (
    *expert_tensors("mlp.gate.weight", "mlp.experts", {name: name for name in _PROJECTIONS}),
    *(
        Tensor(f"layers/mlp/shared_experts/{n}/kernel", LAYER + f"mlp.shared_expert.{n}.weight", ((1,), (0,)))
        for n in _PROJECTIONS
    ),
    Tensor("layers/mlp/shared_gate/kernel", LAYER + "mlp.shared_expert_gate.weight", ((1,), (0,))),
)

_BUFFERS = r".*rotary_emb\.inv_freq|mtp\..*|(model\.)?visual\..*"
"""Tensors that are not read, such as those of a layer for multi-token prediction that the model is to do without."""
_PREDICTION = (
    Tensor("layers/embedding_norm/scale", "mtp.pre_fc_norm_embedding.weight", ((0,),)),
    Tensor("layers/hidden_norm/scale", "mtp.pre_fc_norm_hidden.weight", ((0,),)),
    Tensor("layers/projection/kernel", "mtp.fc.weight", ((1,), (0,))),
    Tensor("layers/final_norm/scale", "mtp.norm.weight", ((0,),)),
)


def _predictions(key: str, default: int) -> Row:
    """Return the row of the number of layers for multi-token prediction, of which none or one are read."""

    def read(config: Keys) -> dict[str, Any]:
        one = config.get(key, default) == 1 and not config.get("mtp_use_dedicated_embeddings")
        return {"num_nextn_predict_layers": int(one)}

    return Row((key, "mtp_use_dedicated_embeddings"), read, lambda model: {key: model.num_nextn_predict_layers})


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    rows=(
        *shape(kv_heads=2, head_dim=256),
        *_HYBRID,
        *_experts(10, "norm_topk_prob", "decoder_sparse_step"),
        fixed("mlp_only_layers", [], None),
        _predictions("num_nextn_predict_layers", 1),
    ),
    tensors=(
        *_HYBRID_TENSORS,
        *_PREDICTION,
        *_joined(tuple(f"in_proj_{n}" for n in "qkvz"), "linear_attn.in_proj_qkvz.weight", groups=_key_heads),
        *(
            Tensor(
                f"layers/attention/in_proj_{n}/kernel",
                LAYER + "linear_attn.in_proj_ba.weight",
                ((1,), (0,)),
                0,
                groups=_key_heads,
            )
            for n in "ba"
        ),
        *_DENSE,
        *_MIXTURE,
    ),
    ignored=TRAINING_KEYS,
    buffers=_BUFFERS,
    prediction_prefix="mtp.",
)

_SEPARATE = (
    *_joined(tuple(f"in_proj_{n}" for n in "qkv"), "linear_attn.in_proj_qkv.weight"),
    Tensor("layers/attention/in_proj_z/kernel", LAYER + "linear_attn.in_proj_z.weight", ((1, 2), (0,))),
    *(
        Tensor(f"layers/attention/in_proj_{n}/kernel", LAYER + f"linear_attn.in_proj_{n}.weight", ((1,), (0,)))
        for n in "ba"
    ),
)
_IGNORED = TRAINING_KEYS | {"mamba_ssm_dtype"}

QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    rows=(
        *shape(kv_heads=4, head_dim=256),
        *_HYBRID,
        fixed("attn_output_gate", True),
        fixed(
            "output_gate_type", "swish", "silu", None
        ),  # of the norm of gated DeltaNet; that of attention is a sigmoid
        fixed("mlp_only_layers", [], None),
        _predictions("mtp_num_hidden_layers", 0),
    ),
    tensors=(*_HYBRID_TENSORS, *_PREDICTION, *_SEPARATE, *_DENSE),
    nested=NESTED,
    ignored=_IGNORED,
    buffers=_BUFFERS,
    prediction_prefix="mtp.",
)

QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    rows=(
        *(row for row in shape(kv_heads=2, head_dim=256) if "intermediate_size" not in row.keys),
        *_HYBRID,
        *_experts(8),
        fixed("attn_output_gate", True),
        fixed(
            "output_gate_type", "swish", "silu", None
        ),  # of the norm of gated DeltaNet; that of attention is a sigmoid
        fixed("mlp_only_layers", [], None),
        _predictions("mtp_num_hidden_layers", 0),
    ),
    tensors=(*_HYBRID_TENSORS, *_PREDICTION, *_SEPARATE, *_MIXTURE),
    # The releases have all experts of a layer in one tensor, transformers writes one for each.
    alternatives=tuple(
        Tensor(
            f"layers/mlp/{ours}/kernel", LAYER + f"mlp.experts.{theirs}", ((0,), (2,), (1,)), joined, of_experts=True
        )
        for ours, theirs, joined in (
            ("gate_proj", "gate_up_proj", 1),
            ("up_proj", "gate_up_proj", 1),
            ("down_proj", "down_proj", None),
        )
    ),
    nested=NESTED,
    ignored=_IGNORED,
    buffers=_BUFFERS,
    prediction_prefix="mtp.",
)

_IMAGES = frozenset(
    ["vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
    + ["language_model_only"]
)
QWEN3_5_MULTIMODAL = Multimodal(QWEN3_5, defaults={}, ignored=_IMAGES)
QWEN3_5_MOE_MULTIMODAL = Multimodal(QWEN3_5_MOE, defaults={}, ignored=_IMAGES)
