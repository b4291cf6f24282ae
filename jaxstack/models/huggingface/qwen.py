"""Hugging Face formats of Qwen 2.5 (Qwen Team 2024; query, key, value biases) and Qwen 3 (2025; query-key norm)."""

from collections.abc import Sequence
from typing import Any

from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import Keys, activation, always, fixed, layer_types, rope, windows
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import TENSORS, attention_bias, max_positions, shape


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
