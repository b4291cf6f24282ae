"""The shipped model shapes: one short YAML file each."""

from pathlib import Path
from typing import Any

from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError, nearest
from jaxstack.models.config import ModelConfig

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset_config(name: str, **changes: Any) -> ModelConfig:
    """A preset as a `ModelConfig`, with single fields changed.

    Raises:
      ConfigError: there is no such preset, or a change breaks a rule.
    """
    return build_component(ModelConfig, {**load_preset(name), "preset": name, **changes}, f"preset {name}")


def load_preset(name: str) -> dict[str, Any]:
    """The `model:` section of a preset as plain data.

    Raises:
      ConfigError: there is no such preset.
    """
    if not isinstance(name, str) or name not in preset_names():
        raise ConfigError(f"model.preset: there is no preset {name!r}; {nearest(str(name), preset_names())}")
    return load_yaml(_FOLDER / f"{name}.yaml")
