"""The shipped model shapes: one short YAML file each."""

from pathlib import Path
from typing import Any

from jaxstack.config import load_yaml
from jaxstack.errors import ConfigError, nearest

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The `model:` section of a preset as plain data.

    Raises:
      ConfigError: there is no such preset.
    """
    if not isinstance(name, str) or name not in preset_names():
        raise ConfigError(f"model.preset: there is no preset {name!r}; {nearest(str(name), preset_names())}")
    return load_yaml(_FOLDER / f"{name}.yaml")
