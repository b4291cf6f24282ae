"""config.json of the families: what released files say, what is refused, what an export writes."""

import json
import math
from pathlib import Path

import pytest

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, preset_config
from jaxstack.models.attention.gated import GatedAttention
from jaxstack.models.huggingface.families import FAMILIES, MULTIMODAL, choose_family, read_model_config
from jaxstack.models.huggingface.family import differences
from jaxstack.models.recurrent import StateSpace

FIXTURES = sorted(path.parent for path in Path(__file__).parent.glob("*/config.json"))
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
RELEASED = {
    "llama3-8b": LLAMA,
    "mistral-7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma2-2b": {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma3-4b": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
        "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "gemma4-31b": {
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None,
        "boi_token_id": 255999, "eoi_token_id": 258882, "image_token_id": 258880, "tie_word_embeddings": True,
        "vision_soft_tokens_per_image": 280, "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
        "text_config": {
            "attention_k_eq_v": True, "enable_moe_block": False, "expert_intermediate_size": None, "num_experts": None,
            "top_k_experts": None, "final_logit_softcapping": 30.0, "head_dim": 256,
            "global_head_dim": 512, "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
            "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4,
            "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "sliding_window": 1024,
            "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262144,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    },
    "gemma4-26b-a4b": {
        "model_type": "gemma4_text", "attention_k_eq_v": True, "enable_moe_block": True, "global_head_dim": 512,
        "final_logit_softcapping": 30.0, "hidden_size": 2816, "hidden_size_per_layer_input": 0, "num_experts": 128,
        "intermediate_size": 2112, "max_position_embeddings": 262144, "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
        "sliding_window": 1024, "top_k_experts": 8, "vocab_size": 262144,
    },
    "gemma4-e2b": {
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_token_id": 258881,
        "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"}, "vision_config": {"hidden_size": 768},
        "text_config": {
            "attention_k_eq_v": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "hidden_size": 1536,
            "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "num_attention_heads": 8,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "max_position_embeddings": 131072,
            "model_type": "gemma4_text", "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
            "sliding_window": 512, "use_double_wide_mlp": True, "vocab_size": 262144,
        },
    },
    "gemma4-e4b": {
        "model_type": "gemma4_text", "final_logit_softcapping": 30.0, "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 8, "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "llama4-scout": {
        "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080,
        "eoi_token_index": 200081, "image_token_index": 200092, "torch_dtype": "bfloat16",
        "text_config": {
            "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
            "attention_dropout": 0.0, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
            "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
            "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_cache": True,
            "use_qk_norm": True, "vocab_size": 202048,
        },
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "num_hidden_layers": 34},
    },
    "olmo3-7b": {
        "model_type": "olmo3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 100278,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "phi4-mini": {
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [
                1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
                2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533,
                5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
                14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1,
                32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
            ],
            "short_factor": [1.0] * 48, "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "attention_bias": False, "attention_dropout": 0.0, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    },
    "granite4-h-tiny": {
        "model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup",
        "initializer_range": 0.1, "intermediate_size": 512, "logits_scaling": 6, "mamba_chunk_size": 256,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": False, "max_position_embeddings": 131072, "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
        "num_local_experts": 64, "output_router_logits": False, "position_embedding_type": "nope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
        "router_aux_loss_coef": 0.0, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "nemotron3-nano-30b-a3b": {
        "model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
        "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05,
        "hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME", "mamba_head_dim": 64,
        "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "mlp_bias": False,
        "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
        "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1,
        "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.1, "layer_norm_epsilon": 1e-05, "n_groups": 1,
        "norm_before_gate": False, "num_heads": 80, "num_hidden_layers": 64, "rescale_prenorm_residual": False,
        "residual_in_fp32": True, "rms_norm": True, "state_size": 128, "tie_word_embeddings": True,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 160, "use_bias": False, "use_conv_bias": True, "vocab_size": 50288,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    },
}  # fmt: skip
DELTA = {
    "attention_bias": False, "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "rms_norm_eps": 1e-06,
}  # fmt: skip
RELEASED["qwen3-next-80b-a3b"] = {
    **DELTA, "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "hidden_size": 2048,
    "intermediate_size": 5120, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_5 = {
    **DELTA, "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
RELEASED["qwen3.5-4b"] = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
    "tie_word_embeddings": True, "vision_config": {"model_type": "qwen3_5"},
    "text_config": {
        **QWEN3_5, "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
RELEASED["qwen3.5-35b-a3b"] = {
    "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
    "vision_config": {"model_type": "qwen3_5_moe"},
    "text_config": {
        **QWEN3_5, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
RELEASED["kimi-k2"] = RELEASED["deepseek-v3"] | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": RELEASED["deepseek-v3"]["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1,
}  # fmt: skip

RELEASED["kimi-linear-48b-a3b"] = {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72,
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "hidden_act": "silu", "hidden_size": 2304,
    "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4], "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip

RELEASED["olmo-hybrid-7b"] = {
    "model_type": "olmo_hybrid", "attention_bias": False, "hidden_act": "silu", "hidden_size": 3840,
    "intermediate_size": 11008, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_num_key_heads": 30,
    "linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings": 65536,
    "num_attention_heads": 30, "num_hidden_layers": 32, "num_key_value_heads": 30, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": None}, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip


MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b")


def read(config: dict) -> ModelConfig:
    if config["model_type"] in MULTIMODAL:
        config = MULTIMODAL[config["model_type"]].text_config(config)
    return FAMILIES[config["model_type"]].read(config)


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations_are_the_presets(name):
    found = read(RELEASED[name])
    preset = preset_config(name)
    if name != "llama3-8b":
        preset = preset.model_copy(update={"vocab_size": found.vocab_size})
    if name in ("llama3-8b", "mistral-7b"):  # Llama 3.0 has no scaling; versions of Mistral differ in the base.
        preset = preset.model_copy(update={"rope_scaling": found.rope_scaling, "rope_theta": found.rope_theta})
    assert differences(found.model_copy(update={"num_nextn_predict_layers": 0}), preset) == []


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-4.5-air"])
def test_the_weight_of_the_balance_loss_is_that_of_the_preset(name):
    """DeepSeek V2 and Kimi K2 give it in config.json; the files of V3 and GLM leave it out."""
    found = read(RELEASED[name])
    assert found.moe.router_aux_loss_coef == preset_config(name).moe.router_aux_loss_coef


def test_keys_of_later_releases_that_say_what_is_known_are_read():
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read({**RELEASED["qwen3-30b-a3b"], **coder}) == read(RELEASED["qwen3-30b-a3b"])
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size: 512 is not supported"):
        read({**RELEASED["qwen3-30b-a3b"], "shared_expert_intermediate_size": 512})


def test_gemma3_of_transformers_4_has_windows_in_a_pattern_and_a_base_of_their_own():
    model = read(
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        }  # fmt: skip
    )
    assert [i for i, window in enumerate(model.windows()) if window is None] == [5, 11, 17, 23]
    assert (model.rope_theta, model.rope_local_base_freq, model.qk_norm) == (1e6, 1e4, True)
    assert (model.tie_word_embeddings, model.final_logit_softcapping, model.attention_scale) == (True, None, 1 / 16)


def test_limits_of_step_sizes_are_read_with_infinity_in_both_spellings():
    mamba = {"model_type": "mamba2", "num_heads": 4, "head_dim": 8, "hidden_size": 16, "n_groups": 1}
    for high in (math.inf, {"__float__": "Infinity"}):
        model = read({**mamba, "time_step_limit": [0.25, high]})
        assert model.ssd.time_step_limit == (0.25, None)
    written = FAMILIES["mamba2"].write(model)
    assert read(written) == model and written["time_step_limit"] == [0.25, {"__float__": "Infinity"}]
    assert "time_step_limit" not in FAMILIES["mamba2"].write(read(mamba))


def test_llama_scaling_is_read_in_both_spellings():
    newer = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert read(newer) == read(LLAMA)
    assert read(LLAMA).rope_scaling.factor == 8.0  # type: ignore[union-attr]
    linear = read({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope_scaling is not None and linear.rope_scaling.rope_type == "linear"


def test_yarn_is_read_with_the_defaults_of_transformers():
    said = {"type": "yarn", "factor": 4.0, "mscale": 0.707, "attention_factor": None, "truncate": False}
    model = read({**LLAMA, "rope_scaling": said})
    scaling = model.rope_scaling
    assert scaling is not None and (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32, 1, False)
    assert (scaling.original_max_position_embeddings, scaling.mscale, scaling.attention_factor) == (131072, 0.707, None)
    written = choose_family(model, "llama")[1]["rope_scaling"]
    assert written == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "mscale": 0.707,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 32.0}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "longrope", "beta_fast": 32.0}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "lacks factor, long_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default"}}, "they differ"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"some_new_feature": None}, "some_new_feature"),
        ({"hidden_act": "swiglu_oai"}, "'swiglu_oai'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match="config.json") as error:
        read({**LLAMA, **change})
    assert named in str(error.value)


def test_phi_writes_its_scaling_as_its_own_code_reads_it():
    written = choose_family(preset_config("phi4-mini"))[1]
    assert written["model_type"] == "phi3" and written["original_max_position_embeddings"] == 4096
    assert sorted(written["rope_scaling"]) == ["long_factor", "short_factor", "type"]
    released = RELEASED["phi4-mini"]
    nested = {**released["rope_scaling"], "original_max_position_embeddings": 8192, "type": "su"}
    assert read({**released, "rope_scaling": nested}) == read(released)  # as transformers: the outer length wins
    assert read({**released, "sliding_window": 2047}).windows() == (2047,) * 32


def test_a_key_can_be_ignored_on_purpose():
    assert FAMILIES["llama"].read({**LLAMA, "some_new_feature": 1}, ["some_new_feature"]) == read(LLAMA)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"num_hidden_layers": "x"}),
        ("llama", {"rope_scaling": "linear"}),
        ("llama", {"rope_parameters": [1]}),
        ("llama", {"hidden_act": ["silu"]}),
        ("llama", {"vocab_size": "many"}),
        ("gemma2", {"layer_types": 3}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}),
        ("qwen2", {"layer_types": None, "max_window_layers": {}}),
        ("mixtral", {"num_local_experts": -1}),
        ("qwen3-moe", {"num_experts_per_tok": []}),
        ("smollm3", {"num_hidden_layers": 0}),
        ("granite", {"attention_multiplier": -0.5}),
    ],
)
def test_values_of_a_wrong_kind_are_named(family, change):
    config = json.loads((Path(__file__).parent / family / "config.json").read_text())
    with pytest.raises(ConfigError, match="config.json"):
        read({**config, **change})


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "only longrope"),
        ("glm4-moe", {"topk_method": "greedy"}, "topk_method"),
        ("glm4-moe-lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("glm4-moe-lite", {"first_k_dense_replace": 2}, "first_k_dense_replace (2)"),
        ("glm4-moe-lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma4-dense", {"num_kv_shared_layers": 3}, "layers 1 to 1 have none of type full_attention"),
        ("gemma4-shared-keys", {"vocab_size_per_layer_input": 32}, "vocab_size_per_layer_input (32)"),
        ("gemma4-dense", {"enable_moe_block": True}, "config.json has no num_experts"),
        ("gemma4-dense", {"layer_types": ["sliding_attention"] * 4}, "must end with full_attention"),
        ("gemma4-dense", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ("llama4", {"moe_layers": [0, 3]}, "moe_layers"),
        ("llama4", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("llama4", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
        ("gemma3-multimodal", {"text_config": {"model_type": "gemma3n_text"}}, "'gemma3n_text'"),
        ("gemma3-multimodal", {"text_config": None}, "text_config"),
        ("gemma3-multimodal", {"audio_config": {}}, "audio_config"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding"),
    ],
)
def test_other_families_refuse_too(family, change, named):
    config = json.loads((Path(__file__).parent / family / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        read({**config, **change})
    assert named in str(error.value)


def test_an_unknown_family_names_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_txt"}')
    with pytest.raises(ConfigError, match="gemma3_text"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(ConfigError, match="not supported"):
        read_model_config(tmp_path)


# Two families that are others with other names of keys or tensors, and a text model.
_WRITTEN_AS = {"glm4_moe_lite": "deepseek_v3", "qwen3_5_moe_text": "qwen3_next", "gemma3": "gemma3_text"}


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda path: path.name)
def test_what_is_written_reads_as_the_same_model_and_family(folder):
    model = read_model_config(folder)
    family, written = choose_family(model)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert family.model_type == _WRITTEN_AS.get(kind, kind)
    assert differences(model, family.read(json.loads(json.dumps(written)))) == []


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-124m",
        "llama3-1b",
        "qwen2.5-7b",
        "gemma2-2b",
        "gemma3-4b",
        "gemma4-31b",
        "gemma4-26b-a4b",
        "gemma4-e2b",
        "gemma4-e4b",
        "mistral-7b",
        "qwen3-8b",
        "smollm3-3b",
        "granite3-8b",
        "phi4-mini",
        "olmo2-7b",
        "olmo3-7b",
        "glm-4.5-air",
        "llama4-scout",
        "qwen3-next-80b-a3b",
        "qwen3.5-4b",
        *MIXTURES,
    ],
)
def test_presets_can_be_exported(name):
    preset = preset_config(name)
    assert differences(preset, choose_family(preset)[0].read(choose_family(preset)[1])) == []


def test_a_model_that_no_family_has_is_refused_with_reasons():
    strange = ModelConfig(vocab_size=64, norm="layer_norm", mlp="gated", positions="rope")
    with pytest.raises(ConfigError, match="no Hugging Face family") as error:
        choose_family(strange)
    assert "llama cannot express this model: norm layer_norm, not rms_norm" in str(error.value)
    with pytest.raises(ConfigError, match=r"^llama cannot express this model: qk_norm True, not False; leave "):
        choose_family(ModelConfig(vocab_size=64, qk_norm=True), "llama")
    with pytest.raises(ConfigError, match="^gpt2 cannot express this model: its config.json would have no n_positions"):
        choose_family(ModelConfig(vocab_size=64), "gpt2")
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        choose_family(strange, "lama")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"layer_types": ("delta", "full_attention"), "attention": GatedAttention()}, "norm rms_norm, not rms_norm_un"),
        ({"layer_types": ("ssd", "full_attention"), "ssd": StateSpace(n_groups=2)}, "mamba_n_groups: 2"),
    ],
)
def test_the_refusal_of_a_hybrid_names_the_nearest_families_only(model, said):
    with pytest.raises(ConfigError, match="no Hugging Face family") as error:
        choose_family(ModelConfig(vocab_size=64, positions="none" if "ssd" in model else "rope", **model))
    assert said in str(error.value)
    assert "qwen3 cannot express" not in str(error.value)
    assert len(str(error.value).splitlines()) < len(FAMILIES) / 2 + 2
