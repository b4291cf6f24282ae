"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, and matrices with the input dim first (Conv1D)."""

from jaxstack.models.huggingface.config_fields import activation, always, fixed, same
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.tensors import Tensor

_LAYER = "transformer.h.{layer}."
_FUSED = ("q_proj", "k_proj", "v_proj")

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    rows=(
        same("vocab_size", "vocab_size"),
        same("n_embd", "hidden_size"),
        same("n_layer", "num_layers"),
        same("n_head", "num_heads"),
        same("n_inner", "intermediate_size", None, lambda model: model.feed_forward_size),
        same("n_positions", "max_position_embeddings"),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        same("initializer_range", "initializer_range", 0.02),
        same("tie_word_embeddings", "tie_word_embeddings", True),
        activation("activation_function", "gelu_new"),
        fixed("scale_attn_weights", True),
        fixed("scale_attn_by_inverse_layer_idx", False),
        fixed("add_cross_attention", False),
        fixed("is_encoder_decoder", False),
        always(norm="layer_norm", positions="learned", mlp="plain", qkv_bias=True, output_bias=True, mlp_bias=True),
    ),
    tensors=(
        Tensor("embedding/table", "transformer.wte.weight", ((0,), (1,))),
        Tensor("position_embedding/table", "transformer.wpe.weight", ((0,), (1,))),
        Tensor("layers/attention_norm/scale", _LAYER + "ln_1.weight", ((0,),)),
        Tensor("layers/attention_norm/bias", _LAYER + "ln_1.bias", ((0,),)),
        *(
            Tensor(f"layers/attention/{name}/kernel", _LAYER + "attn.c_attn.weight", ((0,), (1, 2)), joined=1)
            for name in _FUSED
        ),
        *(Tensor(f"layers/attention/{name}/bias", _LAYER + "attn.c_attn.bias", ((0, 1),), joined=0) for name in _FUSED),
        Tensor("layers/attention/o_proj/kernel", _LAYER + "attn.c_proj.weight", ((0, 1), (2,))),
        Tensor("layers/attention/o_proj/bias", _LAYER + "attn.c_proj.bias", ((0,),)),
        Tensor("layers/mlp_norm/scale", _LAYER + "ln_2.weight", ((0,),)),
        Tensor("layers/mlp_norm/bias", _LAYER + "ln_2.bias", ((0,),)),
        Tensor("layers/mlp/up_proj/kernel", _LAYER + "mlp.c_fc.weight", ((0,), (1,))),
        Tensor("layers/mlp/up_proj/bias", _LAYER + "mlp.c_fc.bias", ((0,),)),
        Tensor("layers/mlp/down_proj/kernel", _LAYER + "mlp.c_proj.weight", ((0,), (1,))),
        Tensor("layers/mlp/down_proj/bias", _LAYER + "mlp.c_proj.bias", ((0,),)),
        Tensor("final_norm/scale", "transformer.ln_f.weight", ((0,),)),
        Tensor("final_norm/bias", "transformer.ln_f.bias", ((0,),)),
        Tensor("head", "lm_head.weight", ((1,), (0,))),
    ),
    prefix="transformer.",
    # n_ctx repeats n_positions; the summary belongs to another head; reordering only changes the precision.
    ignored=frozenset(
        ["n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"]
        + ["summary_proj_to_labels", "summary_first_dropout"]
    ),
    buffers=r".*\.attn\.(masked_)?bias",
)
