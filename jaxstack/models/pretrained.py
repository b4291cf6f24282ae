"""What a directory that a run starts from says of the new run: `run.init_from`."""

from pathlib import Path
from typing import Any

from jaxstack.config.loader import build_component, load_yaml, merge_trees
from jaxstack.errors import ConfigError
from jaxstack.models.adapters import AdapterConfig, AdapterRule
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import read_model_config

_RUN, _HUGGING_FACE = "config.yaml", "config.json"


def is_run(directory: str | Path) -> bool:
    """Whether it is a run directory (False: a Hugging Face checkpoint).

    Raises:
      ConfigError: it is neither.
    """
    if (Path(directory) / _RUN).is_file():
        return True
    if (Path(directory) / _HUGGING_FACE).is_file():
        return False
    raise ConfigError(
        f"{directory} is neither a run directory (with {_RUN}) nor a Hugging Face checkpoint (with {_HUGGING_FACE})."
    )


def read_model(directory: str | Path) -> ModelConfig:
    """The model of a run directory or a Hugging Face checkpoint.

    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    if not is_run(directory):
        return read_model_config(directory)
    path = Path(directory) / _RUN
    return build_component(ModelConfig, load_yaml(path).get("model") or {}, str(path))


def read_adapters(run: str | Path) -> tuple[AdapterRule, ...]:
    """The adapters that the model of a run directory has beside the weights.

    Raises:
      ConfigError: they cannot be read.
    """
    path = Path(run) / _RUN
    return build_component(AdapterConfig, load_yaml(path).get("adapters") or {}, str(path)).rules


def fill_in(tree: dict[str, Any], directory: str) -> dict[str, Any]:
    """The configuration with the model and the tokenizer of the starting point, where it does not say otherwise.

    A directory that is gone changes nothing: the run may have a checkpoint of its own by now.
    """
    path = Path(directory).expanduser()
    if not (path / _RUN).is_file() and not (path / _HUGGING_FACE).is_file():
        return tree
    model, data = tree.get("model") or {}, tree.get("data") or {}
    if isinstance(model, dict) and model.get("preset") is None:
        # How layers are stacked is the new run's own: with FP8 the first and the last stay out of the scan.
        known = read_model(path).model_dump(mode="json", exclude={"unscanned_end_layers"})
        tree = {**tree, "model": merge_trees(known, model)}
    folder, file = (path / "tokenizer", "jaxstack_tokenizer.json") if is_run(path) else (path, "tokenizer.json")
    if isinstance(data, dict) and "tokenizer" not in data and (folder / file).is_file():
        tree = {**tree, "data": {**data, "tokenizer": {"name": "file", "path": str(folder)}}}
    return tree
