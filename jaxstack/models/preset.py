"""Presets: model configurations that come with the package, one short YAML file each."""

from pathlib import Path
from typing import Any

from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError, nearest
from jaxstack.models.config import ModelConfig

_DIRECTORY = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def preset_config(name: str, **changes: Any) -> ModelConfig:
    """Load the preset with this name as a `ModelConfig`.

    Args:
      changes: fields that differ from the preset.

    Raises:
      ConfigError: there is no such preset, or a change breaks a rule.
    """
    return build_component(ModelConfig, {**load_preset(name), "preset": name, **changes}, f"preset {name}")


def load_preset(name: str) -> dict[str, Any]:
    """Load the `model:` section of a preset's YAML file as plain data.

    Raises:
      ConfigError: there is no such preset.
    """
    if not isinstance(name, str) or name not in preset_names():
        raise ConfigError(f"model.preset: there is no preset {name!r}; {nearest(str(name), preset_names())}")
    return load_yaml(_DIRECTORY / f"{name}.yaml")
