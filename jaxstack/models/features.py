"""Features of a model: what their settings are, and which features of the model or of a run they exclude."""

import functools

from jaxstack.config.features import Excludes, Feature
from jaxstack.models.config import ATTENTION_ALONE, LATENTS, NOT_SOFTMAX, SOFTMAX_KINDS, ModelConfig
from jaxstack.parallel.config import MIXTURE


def _has_mixer(title: str, model: ModelConfig) -> bool:
    return title in [mixer.title for mixer in model.mixers()]


def _has_attention(name: str, model: ModelConfig) -> bool:
    return model.attention.name == name


_READ_MORE = (
    "the layers of this model read more: model.num_kv_shared_layers is {model.num_kv_shared_layers}, "
    "model.hidden_size_per_layer_input is {model.hidden_size_per_layer_input}"
)

FEATURES = (
    Feature("unrolled layers", "model", lambda model: not model.scan_layers, ("model.scan_layers=false",)),
    Feature("recomputation", "model", lambda model: model.remat != "none", ("model.remat=full",)),
    Feature("offloading", "model", lambda model: model.remat.endswith("offload"), ("model.remat=offload",)),
    Feature(
        "muP",
        "model",
        lambda model: model.parametrization == "mup",
        ("model.parametrization=mup", "model.base_width=16"),
    ),
    Feature("mixture of experts", "model", lambda model: model.moe is not None, MIXTURE),
    Feature(
        "expert capacity",
        "model",
        lambda model: model.moe is not None and model.moe.capacity_factor is not None,
        (*MIXTURE, "model.moe.capacity_factor=1.25"),
        excludes=(
            Excludes(
                "context parallelism",
                "the capacity counts the tokens of whole sequences",
                "model.moe.capacity_factor ({model.moe.capacity_factor}) counts the tokens of whole sequences, but "
                "parallel.context ({parallel.context}) splits sequences; remove one of the two.",
            ),
        ),
    ),
    Feature(
        "multi-token prediction",
        "model",
        lambda model: model.num_nextn_predict_layers > 0,
        ("model.num_nextn_predict_layers=1",),
    ),
    Feature(
        "per-layer embeddings or shared keys",
        "model",
        lambda model: not model.layers_are_independent,
        ("model.hidden_size_per_layer_input=16",),
        excludes=(
            Excludes(
                "pipeline",
                "a stage gets only the residual stream of the stage before it",
                "parallel.pipeline ({parallel.pipeline}) passes only the residual stream from stage to stage, but "
                f"{_READ_MORE}; set parallel.pipeline=1 and use fsdp, tensor or context.",
            ),
            Excludes(
                "muP",
                "how the learning rates of their weights depend on the width is not known",
                "parametrization: mup does not know how learning rates depend on the width where "
                f"{_READ_MORE}; use parametrization: standard.",
            ),
            Excludes(
                "prefetch",
                "the loop that gathers ahead has gradients of the residual stream and of weights only",
                "parallel.prefetch ({parallel.prefetch}) has gradients of the residual stream and of weights only, but "
                f"{_READ_MORE}; remove parallel.prefetch.",
            ),
            Excludes(
                "multi-token prediction",
                "the layers that predict have no keys, values and embeddings of the model's layers",
                "num_nextn_predict_layers ({model.num_nextn_predict_layers}) must be 0, as the layers that predict "
                f"have no keys, values and embeddings of the model's layers, but {_READ_MORE}.",
            ),
        ),
    ),
    Feature("tied embeddings", "model", lambda model: model.tie_word_embeddings, ("model.tie_word_embeddings=true",)),
    Feature("dropout", "model", lambda model: model.dropout > 0, ("model.dropout=0.1",)),
    *(
        Feature(
            f"{name} attention",
            "model",
            functools.partial(_has_attention, name),
            (f"model.attention={{name: {name}{settings}}}",),
            excludes=()
            if name in SOFTMAX_KINDS
            else (Excludes("muP", "its scores are not those of a softmax, for which muP is known", NOT_SOFTMAX),),
        )
        for name, settings in (
            ("linear", ""),
            ("performer", ", features: 16"),
            ("projected", ", block_size: 16"),
            ("block_sparse", ", block_size: 16"),
            ("longformer", ", window: 4"),
        )
    ),
    Feature(
        "latent attention",
        "model",
        functools.partial(_has_attention, "latent"),
        (
            "model.attention={name: latent, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}",
            "model.head_dim=12",
        ),
        excludes=(
            Excludes("muP", "how learning rates of projections to latents depend on the width is not known", LATENTS),
        ),
    ),
    *(
        Feature(
            name,
            "model",
            functools.partial(_has_mixer, mixer),
            (f"model.layer_types=[{mixer},full_attention]", f"model.{mixer}={settings}"),
            excludes=(Excludes("muP", "muP is known for attention alone", ATTENTION_ALONE.replace("{mixer}", mixer)),),
        )
        for name, mixer, settings in (
            ("gated DeltaNet", "delta", "{num_heads: 4, head_dim: 8, num_key_heads: 4, key_head_dim: 8}"),
            ("Kimi Delta Attention", "kda", "{num_heads: 4, head_dim: 8, key_head_dim: 8}"),
            ("Mamba-2", "ssd", "{num_heads: 4, head_dim: 8, state_size: 8, n_groups: 4}"),
        )
    ),
    Feature(
        "attention sinks",
        "model",
        lambda model: getattr(model.attention, "sinks", False),
        ("model.attention={name: softmax, sinks: true}",),
    ),
)
"""Features of a model, see `jaxstack.config.features`."""
