"""The table of supported Hugging Face model families. A new family is a file and a row of `FAMILIES`."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError, nearest
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE,
    GLM4_MOE_LITE,
    KIMI_K2,
)
from jaxstack.models.huggingface.family import Family, Multimodal, OtherModel, differences
from jaxstack.models.huggingface.files import CONFIG, list_tensors, read_json
from jaxstack.models.huggingface.gemma import GEMMA2, GEMMA3, GEMMA3_MULTIMODAL, GEMMA4, GEMMA4_MULTIMODAL
from jaxstack.models.huggingface.gpt2 import GPT2
from jaxstack.models.huggingface.kimi import KIMI_LINEAR
from jaxstack.models.huggingface.llama import GRANITE, LLAMA, MISTRAL, PHI3, SMOLLM3
from jaxstack.models.huggingface.mamba import GRANITE_HYBRID, MAMBA2, NEMOTRON_H
from jaxstack.models.huggingface.mixture import GPT_OSS, LLAMA4, LLAMA4_MULTIMODAL, MIXTRAL, QWEN3_MOE
from jaxstack.models.huggingface.olmo import OLMO2, OLMO3, OLMO_HYBRID
from jaxstack.models.huggingface.quantization_config import KEY, read_quantization
from jaxstack.models.huggingface.qwen import (
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_MULTIMODAL,
    QWEN3_5_MULTIMODAL,
    QWEN3_NEXT,
)

NEAREST_FAMILIES = 4
"""Families that a message names with their differences if none can express a model, the nearest ones."""

FAMILIES = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,  # Llama with windows
        MIXTRAL,
        QWEN2,  # Llama with biases on queries, keys and values only
        QWEN3,  # normalised heads
        QWEN3_MOE,
        GEMMA2,
        GEMMA3,
        GEMMA4,  # two sizes of heads, normalised values
        SMOLLM3,  # layers without rotary positions
        GRANITE,  # factors of embeddings, scores, sublayers and logits
        PHI3,  # rotary positions of a part of each head, joined projections
        OLMO2,  # norms after the sublayers only
        GPT_OSS,  # attention sinks, biases of experts
        DEEPSEEK_V2,  # latent attention
        DEEPSEEK_V3,  # groups of experts, chosen with a bias
        DEEPSEEK_V32,  # attention to keys that an indexer chooses
        KIMI_K2,  # DeepSeek V3 under another name
        GLM4_MOE,  # DeepSeek V3's experts without latent attention
        GLM4_MOE_LITE,  # DeepSeek V3 with other defaults
        LLAMA4,  # attention within chunks, weighted inputs of experts
        KIMI_LINEAR,  # DeepSeek V3 without positions, Kimi Delta Attention in most layers
        QWEN3_NEXT,  # gated DeltaNet and gated attention, a gate of the shared experts
        QWEN3_5,  # the same without experts
        QWEN3_5_MOE,  # Qwen3-Next with other names of tensors
        MAMBA2,  # state space layers alone
        GRANITE_HYBRID,  # with attention, and Granite's factors
        NEMOTRON_H,  # with attention, one sublayer each
        OLMO_HYBRID,  # OLMo 2 with gated DeltaNet layers, whose norms are before the sublayers
        OLMO3,  # OLMo 2 with windows, and rotary positions that are scaled in the other layers
    )
}
"""Families by model_type. An export takes the first that can express the model, so plainer ones come first."""

MULTIMODAL: dict[str, Multimodal] = {
    "gemma3": GEMMA3_MULTIMODAL,
    "gemma4": GEMMA4_MULTIMODAL,
    "llama4": LLAMA4_MULTIMODAL,
    "qwen3_5": QWEN3_5_MULTIMODAL,
    "qwen3_5_moe": QWEN3_5_MOE_MULTIMODAL,
}
"""Multimodal models by model_type, of which only the text model is read."""


def read_model_config(directory: str | Path, ignore: Collection[str] = ()) -> ModelConfig:
    """Read the model configuration from the config.json in a directory.

    Args:
      ignore: unknown keys that are allowed.

    Raises:
      ConfigError: see `from_huggingface`.
    """
    return describe(directory, ignore)[1]


def describe(directory: str | Path, ignore: Collection[str] = ()) -> tuple[Family, ModelConfig]:
    """Read the config.json in a directory; return the Hugging Face model family and the model configuration.

    Raises:
      ConfigError: see `from_huggingface`.
    """
    said = read_json(Path(directory) / CONFIG)
    read_quantization(said)  # refuses what cannot be read
    said.pop(KEY, None)
    kind = said.get("model_type")
    if isinstance(kind, str) and kind in MULTIMODAL:
        said = MULTIMODAL[kind].text_config(said)
        kind = said["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = [*FAMILIES, *MULTIMODAL]
        raise ConfigError(f"{directory}: model_type {kind!r} is not supported; {nearest(str(kind), known)}")
    family = FAMILIES[kind]
    model = family.read(said, ignore)
    # transformers keeps the key when it leaves these layers out.
    if model.num_nextn_predict_layers and not family.predicts(model.num_layers, list_tensors(Path(directory))):
        model = model.model_copy(update={"num_nextn_predict_layers": 0})
    return family, model


def check_model(config: ModelConfig, described: ModelConfig, source: str) -> None:
    """Check that a model configuration computes the same function as the one that the weights were made for.

    Raises:
      ConfigError: it does not; the message lists the fields that differ.
    """
    # Layers for multi-token prediction may be left out.
    described = described.model_copy(update={"num_nextn_predict_layers": config.num_nextn_predict_layers})
    different = differences(config, described)
    if different:
        raise ConfigError(
            f"the weights of {source} are of another model: {'; '.join(different)}. Leave the model's configuration "
            "out (in a run: these keys of model, and data.tokenizer, which decides vocab_size), and theirs is taken."
        )


def choose_family(config: ModelConfig, name: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Choose a Hugging Face family that can express the model; return it and the model's config.json.

    Args:
      name: model_type of the family, or of a multimodal one with its text model; None: the first that can.

    Raises:
      ConfigError: no such family, or it cannot express the model; with the reasons.
    """
    if name in MULTIMODAL:
        name = MULTIMODAL[name].text.model_type
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"there is no model_type {name!r}; {nearest(name, FAMILIES)}")
    reasons: list[ConfigError] = []
    families = list(FAMILIES.values()) if name is None else [FAMILIES[name]]
    if config.num_nextn_predict_layers:  # first those that have such layers
        families.sort(key=lambda family: family.most_predictions < config.num_nextn_predict_layers)
    for family in families:
        try:
            return family, family.write(config)
        except ConfigError as error:
            reasons.append(error)
    if name is not None:
        message = str(reasons[0]).removesuffix(".")
        raise ConfigError(f"{message}; leave the model_type out to take the first that can.")
    nearest_first = sorted(
        (error for error in reasons if isinstance(error, OtherModel)), key=lambda error: error.distance
    )
    unlike = [error for error in reasons if not isinstance(error, OtherModel)]
    shown = "\n  ".join(str(error) for error in (*nearest_first[:NEAREST_FAMILIES], *unlike))
    raise ConfigError(
        f"no Hugging Face family can express this model:\n  {shown}\n"
        f"The others of {len(families)} families differ more; --model-type NAME says in what."
    )
