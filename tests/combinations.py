"""Small runs that use several features at once, on simulated devices."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from jaxstack.config.features import MODEL_DIRECTORY, Feature
from jaxstack.run_config import RunConfig, load_config

VOCABULARY = 64
BASE = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.intermediate_size=48",
    f"model.vocab_size={VOCABULARY}",
    "train.sequence_length=64",
    "train.global_batch_size=16",
    "train.steps=4",
    "parallel.simulate_devices=8",
)
"""A model and a batch that every feature of `jaxstack.run_config.FEATURES` fits."""


def write_model_config(directory: Path) -> None:
    """Write the configuration of a run whose model has the vocabulary of `BASE`, as `Feature.turn_on` asks for."""
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    (directory / "config.yaml").write_text(yaml.safe_dump({"model": model}))


def combined(directory: Path, *features: Feature, further: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a small run that uses all of these features.

    Args:
      directory: where `write_model_config` wrote.
      further: further overrides.

    Raises:
      ConfigError: they exclude each other.
    """
    overrides = dict.fromkeys([*(text for feature in features for text in feature.turn_on), *further])
    return load_config(None, [*BASE, *(text.replace(MODEL_DIRECTORY, str(directory)) for text in overrides)])
