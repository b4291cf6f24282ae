"""Hugging Face format of OLMo 2 (OLMo Team 2025, arXiv:2501.00656): norms of outputs and of all heads together."""

from jaxstack.models.huggingface.config_fields import activation, always, rope
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
