"""The first parameters of a run, from another run's checkpoint or from Hugging Face files: `run.init_from`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.models.huggingface import check_model, read_parameters
from jaxstack.starting_point import is_run, read_model


def initial_parameters(directory: str, model: ModelConfig, abstract: Any, say: Callable[[str], None]) -> Any:
    """The parameters in a run directory (of its newest checkpoint) or a Hugging Face checkpoint.

    Args:
      model: the one that they are for; it must compute what theirs computes.
      abstract: their shapes and shardings, nested dicts; each device reads its own part only.

    Raises:
      ConfigError: there are none, or they are of another model; the message names what differs.
      JaxstackError: a checkpoint is damaged.
    """
    if not is_run(directory):
        say(f"starting from the weights in {directory}")
        return read_parameters(directory, model, jax.tree.map(lambda x: x.sharding, abstract))
    check_model(model, read_model(directory), directory)
    manager = CheckpointManager(Path(directory) / "checkpoints", report=say)
    step = manager.latest_step()
    if step is None:
        raise ConfigError(f"run.init_from: {directory} holds no checkpoint yet.")
    say(f"starting from the parameters of {directory}, step {step}")
    return manager.restore(step, {"params": abstract}, subset=True)[0]["params"]
