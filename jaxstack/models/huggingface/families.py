"""The table of families, and the choice among them."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError, nearest
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.family import Family, differences
from jaxstack.models.huggingface.files import CONFIG, read_json
from jaxstack.models.huggingface.gemma import GEMMA2, GEMMA3
from jaxstack.models.huggingface.gpt2 import GPT2
from jaxstack.models.huggingface.llama import LLAMA, MISTRAL
from jaxstack.models.huggingface.mixture import MIXTRAL, QWEN3_MOE
from jaxstack.models.huggingface.qwen import QWEN2, QWEN3

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
    )
}
"""By model_type, in the order in which an export tries them: the plainest that can express the model comes first."""


def read_model_config(directory: str | Path, ignore: Collection[str] = ()) -> ModelConfig:
    """The model that a directory's config.json describes; `ignore` are keys to pass over though they are not known.

    Raises:
      ConfigError: as `from_huggingface`.
    """
    return describe(directory, ignore)[1]


def describe(directory: str | Path, ignore: Collection[str] = ()) -> tuple[Family, ModelConfig]:
    """The family and the model of a directory's config.json. Raises ConfigError, as `from_huggingface`."""
    said = read_json(Path(directory) / CONFIG)
    kind = said.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{directory}: model_type {kind!r} is not supported; {nearest(str(kind), FAMILIES)}")
    return FAMILIES[kind], FAMILIES[kind].read(said, ignore)


def check_model(config: ModelConfig, described: ModelConfig, source: str) -> None:
    """Raises ConfigError where a model computes something else than the one whose weights `source` has."""
    different = differences(config, described)
    if different:
        raise ConfigError(
            f"the weights of {source} are of another model: {'; '.join(different)}. Leave the model's configuration "
            "out (in a run: these keys of model, and data.tokenizer, which decides vocab_size), and theirs is taken."
        )


def choose_family(config: ModelConfig, name: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family by name, or the first that can express the model, and its config.json.

    Raises:
      ConfigError: it cannot, or none can; with the reasons.
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"there is no model_type {name!r}; {nearest(name, FAMILIES)}")
    reasons = []
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        try:
            return family, family.write(config)
        except ConfigError as error:
            reasons.append(str(error))
    if name is not None:
        raise ConfigError(reasons[0])
    raise ConfigError("no Hugging Face family can express this model:\n  " + "\n  ".join(reasons))
