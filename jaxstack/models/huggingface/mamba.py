"""Hugging Face formats of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) and of hybrids of its layers with attention:
Granite 4 H (Granite Team 2025) and Nemotron-H (NVIDIA 2025, arXiv:2504.03624) with Nemotron 3 Nano.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, Row, activation, always, find, fixed, repeated_part, same
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import (
    ATTENTION,
    ENDS,
    GRANITE,
    LAYER,
    NORMS,
    attention_bias,
    max_positions,
    shape,
)
from jaxstack.models.huggingface.mixture import TRAINING_KEYS
from jaxstack.models.huggingface.tensors import Tensor


def _read_limit(config: Keys) -> list[float | None]:
    """Return the limits of step sizes; transformers 5 writes infinity as a dictionary."""
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    high = float(high["__float__"]) if isinstance(high, Mapping) else float(high)
    return [float(low), None if math.isinf(high) else high]


def state_space(keys: Mapping[str, tuple[str, Any]], expand: str, *, whole: bool = True) -> tuple[Row, ...]:
    """Return the `Row`s that convert the keys of state space layers in config.json to `ModelConfig.ssd`, and back.

    Args:
      keys: their names -> (ours, default of transformers).
      expand: key of the heads' channels as a multiple of hidden_size, which follows from the others.
      whole: True if transformers needs them to be that multiple.
    """

    def read(config: Keys) -> dict[str, Any]:
        found = {ours: find(config, theirs, default) for theirs, (ours, default) in keys.items()}
        if found["head_dim"] == "auto":
            found["head_dim"] = config.get(expand, 2) * find(config, "hidden_size") // found["num_heads"]
        return {"ssd": {**found, "time_step_limit": _read_limit(config)}}

    def write(model: ModelConfig) -> dict[str, Any]:
        kind = model.ssd
        channels = kind.num_heads * kind.head_dim
        if whole and channels % model.hidden_size:
            raise ConfigError(
                f"ssd.num_heads x ssd.head_dim ({channels}) is not a multiple of hidden_size ({model.hidden_size})"
            )
        low, high = kind.time_step_limit
        limit = {} if (low, high) == (0.0, None) else {"time_step_limit": [low, high or {"__float__": "Infinity"}]}
        named = {theirs: getattr(kind, ours) for theirs, (ours, _) in keys.items()}
        return {**named, **limit, **({expand: channels // model.hidden_size} if whole else {})}

    return (Row((*keys, expand, "time_step_limit"), read, write),)


def state_space_tensors(mixer: str) -> tuple[Tensor, ...]:
    """Return the rows of a state space layer, whose tensors' names begin with `mixer`."""
    at = "layers/attention/"
    heads = ((1, 2), (0,))
    steps = ((1,), (0,))
    parts = ("x", "b", "c")
    return (
        *(
            Tensor(f"{at}{name}_proj/kernel", mixer + "in_proj.weight", steps if name == "dt" else heads, 0)
            for name in ("z", *parts, "dt")
        ),
        *(
            Tensor(f"{at}{name}_proj/bias", mixer + "in_proj.bias", ((0,),) if name == "dt" else ((0, 1),), 0)
            for name in ("z", *parts, "dt")
        ),
        *(Tensor(f"{at}{name}_conv/taps", mixer + "conv1d.weight", ((1, 2), (), (0,)), 0) for name in parts),
        *(Tensor(f"{at}{name}_conv/bias", mixer + "conv1d.bias", ((0, 1),), 0) for name in parts),
        Tensor(f"{at}a_log", mixer + "A_log", ((0,),)),
        Tensor(f"{at}dt_bias", mixer + "dt_bias", ((0,),)),
        Tensor(f"{at}skip", mixer + "D", ((0,),)),
        Tensor(f"{at}norm/scale", mixer + "norm.weight", ((0, 1),)),
        Tensor(f"{at}out_proj/kernel", mixer + "out_proj.weight", ((2,), (0, 1))),
        Tensor(f"{at}out_proj/bias", mixer + "out_proj.bias", ((0,),)),
    )


IGNORED = frozenset(
    # Of the computation in chunks, the dtype of the residual stream, and the initialization.
    ["chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_floor"]
)

MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    rows=(
        same("vocab_size", "vocab_size", 32768),
        same("hidden_size", "hidden_size", 4096),
        same("num_hidden_layers", "num_layers", 64),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        same("initializer_range", "initializer_range", 0.1),
        same("tie_word_embeddings", "tie_word_embeddings", False),
        *state_space(
            {
                "num_heads": ("num_heads", 128),
                "head_dim": ("head_dim", 64),
                "state_size": ("state_size", 128),
                "n_groups": ("n_groups", 8),
                "conv_kernel": ("conv_kernel", 4),
                "use_conv_bias": ("use_conv_bias", True),
                "use_bias": ("use_bias", False),
                "time_step_min": ("time_step_min", 0.001),
                "time_step_max": ("time_step_max", 0.1),
            },
            "expand",
        ),
        fixed("hidden_act", "silu", "swish"),
        fixed("rms_norm", True),
        # `num_heads` is that of attention, which no layer has.
        always(norm="rms_norm", positions="none", layer_types=("ssd_only",), num_heads=1),
    ),
    tensors=(
        Tensor("embedding/table", "backbone.embeddings.weight", ((0,), (1,))),
        Tensor("final_norm/scale", "backbone.norm_f.weight", ((0,),)),
        Tensor("head", "lm_head.weight", ((1,), (0,))),
        Tensor("layers/attention_norm/scale", "backbone.layers.{layer}.norm.weight", ((0,),)),
        *state_space_tensors("backbone.layers.{layer}.mixer."),
    ),
    prefix="backbone.",
    # Its own code takes the gate before the norm, whatever `norm_before_gate` says.
    ignored=IGNORED | {"norm_before_gate", "intermediate_size"},
)


def _without(rows: Sequence[Row], *keys: str) -> tuple[Row, ...]:
    """Return the rows of another family that do not read any of these keys."""
    return tuple(row for row in rows if not set(keys) & set(row.keys))


def _shared_experts(width: int, shared: int) -> int:
    """Return how many times the width of a routed expert the shared experts have together.

    Raises:
      ConfigError: it is not a whole number.
    """
    if shared % width:
        raise ConfigError(f"config.json: the width of shared experts ({shared}) must be a multiple of {width}.")
    return shared // width


_GRANITE_TYPES = {
    "mamba": "ssd",
    "linear_attention": "ssd",
    "attention": "full_attention",
    "full_attention": "full_attention",
}


def _read_granite_types(config: Keys) -> dict[str, Any]:
    count = find(config, "num_hidden_layers")
    named = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * count
    strange = sorted({str(name) for name in named} - set(_GRANITE_TYPES))
    if strange or len(named) != count:
        raise ConfigError(
            f"config.json: layer_types must have mamba or attention for each of {count} layers; found {len(named)} "
            f"entries{', ' + strange[0] if strange else ''}."
        )
    return {"layer_types": repeated_part([_GRANITE_TYPES[name] for name in named])}


def _is_ssd(model: ModelConfig) -> list[bool]:
    return [getattr(layer.mixer, "name", None) == "ssd" for layer in model.layers()]


def _read_granite_positions(config: Keys) -> dict[str, Any]:
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ConfigError(f"config.json: position_embedding_type: {kind!r} is not supported; only rope and nope are.")
    return {"positions": "rope" if kind == "rope" else "none"}


def _read_granite_experts(config: Keys) -> dict[str, Any]:
    width = find(config, "intermediate_size", 11008)
    shared = find(config, "shared_intermediate_size", 1024)
    number = config.get("num_local_experts", 8)
    if not number:
        return {"intermediate_size": shared}
    moe = {
        "num_experts": number,
        "num_experts_per_tok": config.get("num_experts_per_tok", 2),
        "moe_intermediate_size": width,
        "n_shared_experts": _shared_experts(width, shared),
        "router_aux_loss_coef": config.get("router_aux_loss_coef", 0.001),
    }
    return {"intermediate_size": width, "moe": moe}


def _write_granite_experts(model: ModelConfig) -> dict[str, Any]:
    if (moe := model.moe) is None:
        size = model.feed_forward_size
        return {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": size} | {
            "shared_intermediate_size": size
        }
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "intermediate_size": model.expert_size,
        "shared_intermediate_size": moe.n_shared_experts * model.expert_size,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
    }


def _granite_mlp(path: str) -> tuple[Tensor, ...]:
    order = ((1,), (0,))
    return (
        Tensor(f"{path}/gate_proj/kernel", LAYER + "shared_mlp.input_linear.weight", order, 0),
        Tensor(f"{path}/up_proj/kernel", LAYER + "shared_mlp.input_linear.weight", order, 0),
        Tensor(f"{path}/down_proj/kernel", LAYER + "shared_mlp.output_linear.weight", order),
    )


def _granite_experts(name: str, theirs: str, joined: int | None = None) -> Tensor:
    """Return the row of the kernel [E, in, out] of a projection of all experts."""
    theirs = LAYER + f"block_sparse_moe.{theirs}.weight"
    return Tensor(f"layers/mlp/{name}/kernel", theirs, ((0,), (2,), (1,)), joined, of_experts=True)


GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    rows=(
        *_without(GRANITE.rows, "intermediate_size", "mlp_bias"),
        Row(
            ("layer_types", "layers_block_type"),
            _read_granite_types,
            lambda model: {"layer_types": ["mamba" if ssd else "attention" for ssd in _is_ssd(model)]},
        ),
        Row(
            ("position_embedding_type",),
            _read_granite_positions,
            lambda model: {"position_embedding_type": "rope" if model.positions == "rope" else "nope"},
        ),
        Row(
            (
                "num_local_experts",
                "num_experts_per_tok",
                "intermediate_size",
                "shared_intermediate_size",
                "router_aux_loss_coef",
            ),
            _read_granite_experts,
            _write_granite_experts,
        ),
        *state_space(
            {
                "mamba_n_heads": ("num_heads", 128),
                "mamba_d_head": ("head_dim", "auto"),
                "mamba_d_state": ("state_size", 256),
                "mamba_n_groups": ("n_groups", 1),
                "mamba_d_conv": ("conv_kernel", 4),
                "mamba_conv_bias": ("use_conv_bias", True),
                "mamba_proj_bias": ("use_bias", False),
            },
            "mamba_expand",
        ),
        fixed("mamba_n_groups", 1),  # its norm is over all channels
        fixed("mlp_bias", False),
        fixed("normalization_function", "rmsnorm"),
    ),
    tensors=(
        *ENDS,
        *ATTENTION,
        *NORMS,
        *state_space_tensors(LAYER + "mamba."),
        *_granite_mlp("layers/mlp"),
        *_granite_mlp("layers/mlp/shared_experts"),
        Tensor("layers/mlp/router/kernel", LAYER + "block_sparse_moe.router.layer.weight", ((1,), (0,))),
        _granite_experts("gate_proj", "input_linear", 1),
        _granite_experts("up_proj", "input_linear", 1),
        _granite_experts("down_proj", "output_linear"),
    ),
    ignored=TRAINING_KEYS | {"mamba_chunk_size", "init_method"},
)


_NEMOTRON_TYPES = {
    "M": "ssd_only",
    "*": "attention_only",
    "E": "feed_forward_only",
    "-": "mlp_only",
}
"""Letter of `hybrid_override_pattern` -> our type."""
_NEMOTRON_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Name in `layers_block_type` -> letter."""
_NEMOTRON_EXPERTS = {
    "n_routed_experts": ("num_experts", 8),
    "num_experts_per_tok": ("num_experts_per_tok", 2),
    "moe_intermediate_size": ("moe_intermediate_size", 7688),
    "routed_scaling_factor": ("routed_scaling_factor", 1.0),
    "n_group": ("n_group", 1),
    "topk_group": ("topk_group", 1),
    "norm_topk_prob": ("norm_topk_prob", True),
}


def _nemotron_pattern(config: Keys) -> str:
    """Return a letter for each layer, as `hybrid_override_pattern` has it."""
    named = config.get("layers_block_type") or config.get("layer_types") or ()
    pattern = config.get("hybrid_override_pattern") or "".join(_NEMOTRON_LETTERS.get(name, "?") for name in named)
    if not pattern or set(pattern) - set(_NEMOTRON_TYPES):
        raise ConfigError(
            f"config.json: hybrid_override_pattern must have M, *, E or - for each layer; found {pattern!r}."
        )
    return pattern


def _read_nemotron_layers(config: Keys) -> dict[str, Any]:
    pattern = _nemotron_pattern(config)
    fields = {"num_layers": len(pattern), "layer_types": repeated_part([_NEMOTRON_TYPES[letter] for letter in pattern])}
    if "E" not in pattern:
        return fields
    moe = {ours: find(config, theirs, default) for theirs, (ours, default) in _NEMOTRON_EXPERTS.items()}
    shared = find(config, "moe_shared_expert_intermediate_size", 7688)
    moe |= {"n_shared_experts": _shared_experts(moe["moe_intermediate_size"], shared)}
    return {**fields, "moe": {**moe, "scoring_func": "sigmoid", "balance_bias": True}}


def _write_nemotron_layers(model: ModelConfig) -> dict[str, Any]:
    letters = []
    for layer, ssd in zip(model.layers(), _is_ssd(model), strict=True):
        letters.append("M" if ssd else "*" if layer.mixer else "-" if layer.feed_forward == "dense" else "E")
    keys: dict[str, Any] = {"hybrid_override_pattern": "".join(letters), "num_hidden_layers": model.num_layers}
    if (moe := model.moe) is None:
        return keys
    keys |= {theirs: getattr(moe, ours) for theirs, (ours, _) in _NEMOTRON_EXPERTS.items()}
    shared = moe.n_shared_experts * model.expert_size
    return keys | {"moe_intermediate_size": model.expert_size, "moe_shared_expert_intermediate_size": shared}


_MIXER = "backbone.layers.{layer}.mixer."


def _nemotron_mlp(path: str, name: str) -> tuple[Tensor, ...]:
    return tuple(
        row
        for projection in ("up_proj", "down_proj")
        for row in (
            Tensor(f"{path}/{projection}/kernel", f"{_MIXER}{name}{projection}.weight", ((1,), (0,))),
            Tensor(f"{path}/{projection}/bias", f"{_MIXER}{name}{projection}.bias", ((0,),)),
        )
    )


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    rows=(
        *_without(shape(kv_heads=8, head_dim=128), "num_hidden_layers", "rms_norm_eps", "intermediate_size"),
        same("intermediate_size", "intermediate_size", 21504, lambda model: model.feed_forward_size),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        max_positions(4096),
        attention_bias(),
        Row(
            (
                "hybrid_override_pattern",
                "layers_block_type",
                "layer_types",
                "num_hidden_layers",
                "moe_shared_expert_intermediate_size",
                *_NEMOTRON_EXPERTS,
            ),
            _read_nemotron_layers,
            _write_nemotron_layers,
        ),
        *state_space(
            {
                "mamba_num_heads": ("num_heads", 128),
                "mamba_head_dim": ("head_dim", 64),
                "ssm_state_size": ("state_size", 128),
                "n_groups": ("n_groups", 8),
                "conv_kernel": ("conv_kernel", 4),
                "use_conv_bias": ("use_conv_bias", True),
                "use_bias": ("use_bias", False),
                "time_step_min": ("time_step_min", 0.001),
                "time_step_max": ("time_step_max", 0.1),
            },
            "expand",
            whole=False,
        ),
        same("mlp_bias", "mlp_bias", False),
        activation("mlp_hidden_act", "relu2"),
        fixed("mamba_hidden_act", "silu"),
        fixed("mamba_proj_bias", False),
        fixed("sliding_window", None),
        fixed("moe_latent_size", None),
        fixed("num_nextn_predict_layers", 0),
        always(norm="rms_norm", mlp="plain", positions="none"),
    ),
    tensors=(
        *MAMBA2.tensors[:3],
        Tensor("layers/attention_norm/scale", "backbone.layers.{layer}.norm.weight", ((0,),)),
        Tensor("layers/mlp_norm/scale", "backbone.layers.{layer}.norm.weight", ((0,),)),
        *state_space_tensors(_MIXER),
        *(
            row._replace(name=row.name.replace(LAYER + "self_attn.", _MIXER))
            for row in ATTENTION
            if row.path.split("/")[-2] in ("q_proj", "k_proj", "v_proj") or row.path == "layers/attention/o_proj/kernel"
        ),
        *_nemotron_mlp("layers/mlp", ""),
        *_nemotron_mlp("layers/mlp/shared_experts", "shared_experts."),
        *(
            Tensor(f"layers/mlp/{name}/kernel", f"{_MIXER}experts.{{expert}}.{name}.weight", ((1,), (0,)))
            for name in ("up_proj", "down_proj")
        ),
        Tensor("layers/mlp/router/kernel", _MIXER + "gate.weight", ((1,), (0,))),
        Tensor("layers/mlp/router/balance_bias", _MIXER + "gate.e_score_correction_bias", ((0,),)),
    ),
    prefix="backbone.",
    ignored=IGNORED
    | TRAINING_KEYS
    | frozenset(["mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "moe_shared_expert_overlap"])
    # Of parts that are not there: rotary positions, layers for multi-token prediction; and of a norm that is as others.
    | frozenset(["rope_theta", "partial_rotary_factor", "mtp_layers_block_type", "mtp_hybrid_override_pattern"])
    | frozenset(["norm_eps", "n_shared_experts"]),
)
