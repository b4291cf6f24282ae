"""Writes tests/models/huggingface/: tiny random models of every family with the logits and greedy tokens that
transformers computes for them in float32. Needs torch and transformers (made with 2.13.0 and 5.23.0).

    python scripts/make_huggingface_fixtures.py [name ...]
"""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from safetensors.numpy import save_file

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "models" / "huggingface"
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 63,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA = {"num_hidden_layers": 4, "intermediate_size": 32, "head_dim": 16, "query_pre_attn_scalar": 12}
GEMMA4 = {
    "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DELTA = {
    "rms_norm_eps": 1e-3,  # a smaller one magnifies rounding errors where a head returns little
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 63,
}  # fmt: skip

MODELS = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", {**SMALL, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": (
        "Llama",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("Mistral", {**SMALL, "head_dim": 16, "sliding_window": 4}),
    "qwen2": ("Qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "gemma2": ("Gemma2", {**SMALL, **GEMMA, "sliding_window": 4, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **SMALL,
            **GEMMA,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            },
        },
    ),
    "gemma3-multimodal": (
        "Gemma3",
        {
            "text_config": {**SMALL, **GEMMA, "sliding_window": 4, "num_hidden_layers": 2, "sliding_window_pattern": 2},
            "vision_config": {
                "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 8, "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4-dense": (
        "Gemma4Text",
        {
            **SMALL, **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            **SMALL, **GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma4-shared-keys": (  # the last four layers read keys and values of layers 1 and 2
        "Gemma4Text",
        {
            **SMALL, **GEMMA4, "num_hidden_layers": 7, "intermediate_size": 16, "num_kv_shared_layers": 4,
            "layer_types": ["sliding_attention"] + ["sliding_attention", "full_attention"] * 3,
            "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        },
    ),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "smollm3": ("SmolLM3", {**SMALL, "num_hidden_layers": 4, "no_rope_layer_interval": 4, "pad_token_id": 1}),
    "granite": (
        "Granite",
        {
            **SMALL,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3",
        {
            **SMALL,
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "sliding_window": 8,
            "original_max_position_embeddings": 4,  # below the prompt, so that all tokens have the long factors
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.0, 1.5, 4.0],
            },
        },
    ),
    "olmo2": ("Olmo2", SMALL),
    "deepseek-v2": (
        "DeepseekV2",
        {**SMALL, **LATENT, "q_lora_rank": None, "n_routed_experts": 4, "topk_method": "greedy", "n_group": 1,
         "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
         "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**SMALL, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4,
         "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v32": (
        "DeepseekV32",
        # Few heads of the indexer would give ties, scores that are exactly 0.
        {**SMALL, **LATENT, "num_hidden_layers": 2, "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4,
         "topk_group": 2, "index_topk": 4, "index_n_heads": 16, "index_head_dim": 12},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {**SMALL, "num_hidden_layers": 3, "head_dim": 8, "attention_bias": True, "use_qk_norm": True,
         "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**SMALL, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "n_routed_experts": 8,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "llama4": (
        "Llama4Text",
        {**SMALL, "num_hidden_layers": 4, "intermediate_size": 16, "intermediate_size_mlp": 48, "head_dim": 8,
         "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 4,
         "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}},
    ),
    "gpt-oss": (
        "GptOss",
        {**SMALL, "num_hidden_layers": 4, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 131072, "pad_token_id": 1,
         "swiglu_limit": 1.0},
    ),
    "olmo3": (
        "Olmo3",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32,
                    "beta_fast": 4.0, "beta_slow": 0.1,
                },
            },
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**SMALL, **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "qwen3-5": ("Qwen3_5Text", {**SMALL, **DELTA}),
    "qwen3-5-moe": (
        "Qwen3_5MoeText",
        {**{key: x for key, x in SMALL.items() if key != "intermediate_size"}, **DELTA, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "kimi-linear": (
        "KimiLinear",
        {**SMALL, **{key: x for key, x in LATENT.items() if key != "num_experts_per_tok"}, "num_hidden_layers": 3,
         "rms_norm_eps": 1e-3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2,
         "num_shared_experts": 1, "pad_token_id": 1},
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {**SMALL, "num_key_value_heads": 4, "rms_norm_eps": 1e-2, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "pad_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": None},
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**SMALL, "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
         "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "shared_intermediate_size": 32,
         "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 8.0,
         "tie_word_embeddings": True},
    ),
    "nemotron-h": (
        "NemotronH",
        {**{key: x for key, x in SMALL.items() if key != "num_hidden_layers"}, "head_dim": 8,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
         "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8, "n_routed_experts": 4,
         "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.5,
         # The smallest step size of transformers, which the releases' own code does not have.
         "time_step_min": 1e-5, "time_step_floor": 0.05},
    ),
    "mamba2": (
        "Mamba2",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16,
         "n_groups": 2, "expand": 2, "chunk_size": 8, "tie_word_embeddings": True,
         "bos_token_id": 0, "eos_token_id": 63},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SMALL, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True},
    ),
}  # fmt: skip
ARCHITECTURES = {
    "GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", "Gemma3": "Gemma3ForConditionalGeneration",
    "Llama4Text": "Llama4ForCausalLM", "Gemma4Text": "Gemma4ForCausalLM", "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}  # fmt: skip


STEPPED = ("KimiLinear", "OlmoHybrid")
"""Models whose gradients are stored too, as the logits after a step."""


def logits_after_a_step(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Returns the logits after a step of gradient descent of size 0.002, which is then undone."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.002 * parameter.grad
        logits = model(tokens).logits
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return logits.numpy().astype(np.float32)


def make(name: str) -> None:
    """Writes one model's folder."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    stored = ("e_score_correction_bias", "layer_scalar")
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(stored)]
    with torch.no_grad():
        for parameter in [*model.parameters(), *buffers]:  # norms too; bfloat16 keeps the files small
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.add_(torch.randn_like(parameter) * spread)
            parameter.copy_(parameter.bfloat16().float())
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    tokens = torch.randint(0, 63, (2, 24), generator=torch.Generator().manual_seed(1))
    arrays = {"tokens": tokens.numpy().astype(np.int32)}
    if kind in STEPPED:
        arrays["logits after a step"] = logits_after_a_step(model, tokens)
    with torch.no_grad():
        logits = model(tokens).logits
        model.generation_config.eos_token_id = None
        greedy = model.generate(tokens[:1, :6], max_new_tokens=12, do_sample=False)[0, 6:]
    folder.mkdir()
    if kind == "DeepseekV3":
        make_prediction_layer(model, tokens, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if kind in RELEASED_NAMES:
        file = folder / "model.safetensors"
        safetensors.torch.save_file(RELEASED_NAMES[kind](safetensors.torch.load_file(file)), file, {"format": "pt"})
    arrays["logits"] = logits.numpy().astype(np.float32)
    save_file({**arrays, "greedy": greedy.numpy().astype(np.int32)}, str(folder / "expected.safetensors"))


def released_kimi(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives dense layers the names that they have in releases; transformers writes those of mixtures."""
    dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    return {dense.sub("mlp", name): x for name, x in tensors.items()}


def released_olmo(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives norms of outputs their names in releases, and cuts convolutions where queries, keys and values meet.

    transformers writes the names of norms of inputs, and cuts the joined convolution in three equal parts.
    """
    found = dict(tensors)
    for name in tensors:
        at = name.removesuffix("q_conv1d.weight")
        if at != name:
            whole = torch.cat([tensors[f"{at}{part}_conv1d.weight"] for part in "qkv"])
            parts = whole.split([len(tensors[f"{at}{part}_proj.weight"]) for part in "qkv"])
            found |= {f"{at}{part}_conv1d.weight": x.clone() for part, x in zip("qkv", parts, strict=True)}
        layer = name.removesuffix("post_feedforward_layernorm.weight")
        if layer != name:
            found[layer + "post_attention_layernorm.weight"] = found.pop(layer + "feedforward_layer_norm.weight")
    return found


RELEASED_NAMES = {"KimiLinear": released_kimi, "OlmoHybrid": released_olmo}
"""Models whose releases have other names of tensors than transformers writes."""


def make_prediction_layer(model: torch.nn.Module, tokens: torch.Tensor, folder: Path) -> None:
    """Writes the tensors of a layer for multi-token prediction, by the names of the release, and its logits."""
    from transformers.modeling_layers import MtpModel

    module = MtpModel(model, 1).float().eval()
    with torch.no_grad():
        for name, parameter in module.layers.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.3 if parameter.ndim == 1 else 0.25)
            parameter.copy_(parameter.bfloat16().float())
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        following = tokens[:, 1:]
        positions = torch.arange(following.shape[1])[None]
        logits = module._project_to_logits(module.forward_layer(0, hidden, positions, None, input_ids=following))
    at = f"model.layers.{model.config.num_hidden_layers}."
    found = {"logits": logits}
    for name, weight in module.layers[0].state_dict().items():
        inner = name.removeprefix("mtp_block.")
        parts = {at + inner.replace("post_norm.", "shared_head.norm."): weight}
        if inner.startswith("mlp.experts."):
            split = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[inner.split(".")[2]]
            parts = {
                f"{at}mlp.experts.{expert}.{theirs}.weight": part
                for expert, joined in enumerate(weight)
                for theirs, part in zip(split, joined.chunk(len(split)), strict=True)
            }
        found |= {key: part.bfloat16().contiguous() for key, part in parts.items()}
    safetensors.torch.save_file(found, str(folder / "prediction.safetensors"))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        make(chosen)
        print(chosen, sum(path.stat().st_size for path in (FOLDER / chosen).iterdir()), "bytes")
