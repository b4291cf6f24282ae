"""Hugging Face format of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), and the rows of state space layers in hybrids."""

import math
from collections.abc import Mapping
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, Row, always, find, fixed, same
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.tensors import Tensor


def _read_limit(config: Keys) -> list[float | None]:
    """Return the limits of step sizes; transformers 5 writes infinity as a dictionary."""
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    high = float(high["__float__"]) if isinstance(high, Mapping) else float(high)
    return [float(low), None if math.isinf(high) else high]


def state_space(keys: Mapping[str, tuple[str, Any]], expand: str) -> tuple[Row, ...]:
    """Return the `Row`s that convert the keys of state space layers in config.json to `ModelConfig.ssd`, and back.

    Args:
      keys: their names -> (ours, default of transformers).
      expand: key of the heads' channels as a multiple of hidden_size, which follows from the others.
    """

    def read(config: Keys) -> dict[str, Any]:
        found = {ours: find(config, theirs, default) for theirs, (ours, default) in keys.items()}
        return {"ssd": {**found, "time_step_limit": _read_limit(config)}}

    def write(model: ModelConfig) -> dict[str, Any]:
        kind = model.ssd
        channels = kind.num_heads * kind.head_dim
        if channels % model.hidden_size:
            raise ConfigError(
                f"ssd.num_heads x ssd.head_dim ({channels}) is not a multiple of hidden_size ({model.hidden_size})"
            )
        low, high = kind.time_step_limit
        limit = {} if (low, high) == (0.0, None) else {"time_step_limit": [low, high or {"__float__": "Infinity"}]}
        named = {theirs: getattr(kind, ours) for theirs, (ours, _) in keys.items()}
        return {**named, **limit, expand: channels // model.hidden_size}

    return (Row((*keys, expand, "time_step_limit"), read, write),)


def state_space_tensors(mixer: str) -> tuple[Tensor, ...]:
    """Return the rows of a state space layer, whose tensors' names begin with `mixer`."""
    at = "layers/attention/"
    heads, steps = ((1, 2), (0,)), ((1,), (0,))
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
        Tensor(f"{at}o_proj/kernel", mixer + "out_proj.weight", ((2,), (0, 1))),
        Tensor(f"{at}o_proj/bias", mixer + "out_proj.bias", ((0,),)),
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
