"""Reads low-rank adapters that are served beside each other, each with the weights of one model."""

from pathlib import Path

from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import check_model
from jaxstack.models.huggingface.peft import PEFT_CONFIG, read_peft
from jaxstack.run.load import run_config
from jaxstack.stored import StoredModel
from jaxstack.stored.run_directory import TrainingRun


def read_adapter(directory: str | Path, model: ModelConfig) -> AdapterMatrices:
    """Read the adapter in a directory of PEFT, or that of a run with `adapters.rules`.

    Args:
      directory: the run, of whose checkpoints the newest is read, or the files of PEFT.
      model: configuration of the model that it was trained for.

    Raises:
      ConfigError: it is another model's, or changes more than dense layers.
      JaxstackError: the run has no checkpoint.
    """
    path = Path(directory)
    unrolled = model.model_copy(update={"scan_layers": False})
    if (path / PEFT_CONFIG).is_file():
        return read_peft(path, unrolled)
    stored = StoredModel.find(path)
    if not isinstance(stored, TrainingRun):
        raise ConfigError(f"{directory} is neither a run with adapters nor a directory of PEFT (with {PEFT_CONFIG}).")
    check_model(unrolled, stored.model, str(directory))
    if stored.adapters and not run_config(stored).trains_adapters_only:
        raise ConfigError(
            f"{directory} trained other weights than its adapters (optimizer.groups), and can only be served alone: "
            f"--run {directory}."
        )
    return stored.read_adapters()
