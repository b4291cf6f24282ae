"""Model and tokenizer settings read from `run.init_from`: another run's directory, or a Hugging Face checkpoint."""

import difflib
from pathlib import Path
from typing import Any

from jaxstack.config.loader import build_component, load_yaml, merge_trees
from jaxstack.errors import ConfigError
from jaxstack.models.adapters import AdapterConfig, AdapterRule
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import read_model_config

_RUN_CONFIG = "config.yaml"
_HUGGING_FACE_CONFIG = "config.json"


def is_run(directory: str | Path) -> bool:
    """Return True if a directory is that of a run, False if it is a Hugging Face checkpoint.

    Raises:
      ConfigError: the directory is neither.
    """
    if (Path(directory) / _RUN_CONFIG).is_file():
        return True
    if (Path(directory) / _HUGGING_FACE_CONFIG).is_file():
        return False
    raise ConfigError(
        f"{directory} is neither a run directory (with {_RUN_CONFIG}) nor a Hugging Face checkpoint "
        f"(with {_HUGGING_FACE_CONFIG}){_similar(Path(directory))}."
    )


def _similar(directory: Path) -> str:
    """Return a hint `; did you mean ...?` for a directory that is wrong but close to a right one, else ""."""
    for above in directory.absolute().parents[:2]:  # such as its checkpoints, or one of them
        if (above / _RUN_CONFIG).is_file() and directory.is_dir():
            return f"; did you mean {above}?"
    parent = directory if directory.is_dir() else directory.parent
    found = [path.parent for name in (_RUN_CONFIG, _HUGGING_FACE_CONFIG) for path in parent.glob(f"*/{name}")]
    names = sorted({path.name for path in found})
    if parent == directory:
        close = names[:3]
    else:
        close = difflib.get_close_matches(directory.name, names, cutoff=0.6)
        close = close or [name for name in names if name.lower() == directory.name.lower()]
    return f"; did you mean {' or '.join(str(parent / name) for name in close)}" if close else ""


def read_pretrained_model_config(directory: str | Path) -> ModelConfig:
    """Read the model configuration from a run directory or a Hugging Face checkpoint.

    Raises:
      ConfigError: the directory has none, or it cannot be read.
    """
    if not is_run(directory):
        return read_model_config(directory)
    path = Path(directory) / _RUN_CONFIG
    return build_component(ModelConfig, load_yaml(path).get("model") or {}, str(path))


def read_adapters(run: str | Path) -> tuple[AdapterRule, ...]:
    """Read the adapter rules (LoRA, DoRA) of the model in a run directory.

    Raises:
      ConfigError: they cannot be read.
    """
    path = Path(run) / _RUN_CONFIG
    return build_component(AdapterConfig, load_yaml(path).get("adapters") or {}, str(path)).rules


def fill_in_model_and_tokenizer(tree: dict[str, Any], directory: str) -> dict[str, Any]:
    """Fill in missing model and tokenizer settings of a configuration from a run or Hugging Face checkpoint.

    A directory that no longer exists changes nothing: the run may have its own checkpoint by now.

    Args:
      tree: the configuration as nested dicts.
      directory: run directory or Hugging Face checkpoint, `run.init_from`.
    """
    path = Path(directory).expanduser()
    if not (path / _RUN_CONFIG).is_file() and not (path / _HUGGING_FACE_CONFIG).is_file():
        return tree
    model = tree.get("model") or {}
    data = tree.get("data") or {}
    if isinstance(model, dict) and model.get("preset") is None:
        # How layers are stacked is for the new run to decide: FP8 keeps the first and the last layer out of the scan.
        known = read_pretrained_model_config(path).model_dump(mode="json", exclude={"unscanned_end_layers"})
        tree = {**tree, "model": merge_trees(known, model)}
    folder, file = (path / "tokenizer", "jaxstack_tokenizer.json") if is_run(path) else (path, "tokenizer.json")
    if isinstance(data, dict) and "tokenizer" not in data and (folder / file).is_file():
        tree = {**tree, "data": {**data, "tokenizer": {"name": "file", "path": str(folder)}}}
    return tree
