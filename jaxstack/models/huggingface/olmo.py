"""Hugging Face formats of OLMo 2 (OLMo Team 2025, arXiv:2501.00656), with norms of outputs and of all heads together,
and OLMo 3 (2025), which adds windows, and scales the rotary positions of the other layers.
"""

from collections.abc import Sequence
from typing import Any

from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.config_fields import (
    Keys,
    Row,
    activation,
    always,
    layer_types,
    rope,
    rope_keys,
    windows,
)
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.llama import ATTENTION, ENDS, LAYER, MLP, attention_bias, max_positions, shape
from jaxstack.models.huggingface.tensors import Tensor

_HEAD_NORMS = tuple(f"layers/attention/{name}/scale" for name in ("q_norm", "k_norm"))
TENSORS = (
    *ENDS,
    *(row for row in ATTENTION if row.path not in _HEAD_NORMS),
    Tensor("layers/attention/q_norm/scale", LAYER + "self_attn.q_norm.weight", ((0, 1),)),
    Tensor("layers/attention/k_norm/scale", LAYER + "self_attn.k_norm.weight", ((0, 1),)),
    Tensor("layers/attention_post_norm/scale", LAYER + "post_attention_layernorm.weight", ((0,),)),
    Tensor("layers/mlp_post_norm/scale", LAYER + "post_feedforward_layernorm.weight", ((0,),)),
    *MLP,
)

_THETA = 500_000.0
_ROPE = rope(_THETA, local=_THETA)


def _read_rope(config: Keys) -> dict[str, Any]:
    """Read the base of all layers, and a scaling that layers with windows do not have."""
    fields = _ROPE.read(config)
    if "sliding_attention" not in (config.get("rope_parameters") or {}):
        fields["rope_local_base_freq"] = fields["rope_theta"]
    if fields["rope_scaling"] is None and fields["rope_local_base_freq"] == fields["rope_theta"]:
        fields["rope_local_base_freq"] = None  # one set of rotations serves all layers
    return fields


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    theta = model.rope_theta
    local = model.rope_local_base_freq or theta
    scaling = rope_keys(model.rope_scaling)
    if theta == local == _THETA:
        return {"rope_theta": theta, "rope_scaling": scaling}
    # transformers 5 reads a single rope_theta for one of the two types of layers only.
    whole = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return {
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


def _three_of_four(config: Keys, layers: int) -> Sequence[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(layers)]


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    rows=(
        *shape(norm_eps=1e-5),
        max_positions(2048),
        rope(),
        attention_bias(),
        activation("hidden_act", "silu"),
        always(norm="rms_norm", mlp="gated", pre_norms=False, post_norms=True, qk_norm="all_heads"),
    ),
    tensors=TENSORS,
)

OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    rows=(
        *(row for row in OLMO2.rows if "rope_theta" not in row.keys),
        Row(("rope_theta", "rope_scaling", "rope_parameters"), _read_rope, _write_rope),
        windows(("layer_types",), _three_of_four, layer_types),
    ),
    tensors=TENSORS,
)
