"""Gemma 2 (Gemma Team 2024) and 3 (2025, its text model): norms before and after sublayers, windows in some layers."""

from collections.abc import Sequence

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import (
    Keys,
    Row,
    activation,
    always,
    fixed,
    layer_types,
    rope,
    same,
    windows,
)
from jaxstack.models.huggingface.family import NESTED, Family, Multimodal
from jaxstack.models.huggingface.llama import ATTENTION, ENDS, LAYER, MLP, attention_bias, max_positions, shape
from jaxstack.models.huggingface.tensors import Tensor

_NORMS = (
    Tensor("layers/attention_norm/scale", LAYER + "input_layernorm.weight", ((0,),)),
    Tensor("layers/attention_post_norm/scale", LAYER + "post_attention_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_norm/scale", LAYER + "pre_feedforward_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", ((0,),)),
)


def _every_second(config: Keys, layers: int) -> Sequence[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _all_but_every_nth(config: Keys, layers: int) -> Sequence[bool]:
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _whole_scalar(model: ModelConfig) -> int:
    """Return the model's `query_pre_attn_scalar` as an integer, which transformers requires."""
    scalar = model.score_divisor
    if scalar != int(scalar):
        raise ConfigError(f"Gemma's query_pre_attn_scalar is a whole number; the model's is {scalar}.")
    return int(scalar)


def _shape(attention_cap: float | None, final_cap: float | None) -> tuple[Row, ...]:
    scalar = "query_pre_attn_scalar"
    return (
        *shape(kv_heads=4, head_dim=256, tied=True),
        attention_bias(),
        same(scalar, scalar, 256.0, _whole_scalar),
        same("attn_logit_softcapping", "attn_logit_softcapping", attention_cap),
        same("final_logit_softcapping", "final_logit_softcapping", final_cap),
        activation("hidden_activation", "gelu_pytorch_tanh"),
        fixed("use_bidirectional_attention", None, False),
        always(norm="rms_norm_unit_offset", post_norms=True, mlp="gated", scale_embeddings=True),
    )


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rows=(
        *_shape(50.0, 30.0),
        max_positions(8192),
        rope(),
        windows(("layer_types",), _every_second, layer_types),
    ),
    tensors=(*ENDS, *ATTENTION, *_NORMS, *MLP),
    ignored=frozenset(["hidden_act"]),  # hidden_activation has precedence
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rows=(
        *_shape(None, None),
        max_positions(131072),
        rope(1_000_000.0, local=10_000.0),
        windows(("layer_types", "sliding_window_pattern", "_sliding_window_pattern"), _all_but_every_nth, layer_types),
        always(qk_norm=True),
    ),
    tensors=(*ENDS, *ATTENTION, *_NORMS, *MLP),
    nested=NESTED,
    buffers=r".*rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*",
)

GEMMA3_MULTIMODAL = Multimodal(
    GEMMA3,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    ignored=frozenset(
        ["vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"]
    ),
)
