"""Loads the teacher model of distillation from the directory that `distill.teacher` names."""

from collections.abc import Callable
from pathlib import Path

from jaxstack.compressed_training.distill import check_vocabulary
from jaxstack.data.load_tokenizer import load_tokenizer
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError
from jaxstack.models.pretrained import is_run, read_pretrained_model_config
from jaxstack.run.init_from import initial_parameters
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that the teacher model of distillation, if any, has the student's vocabulary and tokenizer.

    Raises:
      ConfigError: the directory holds no model, or one with another vocabulary or tokenizer.
    """
    directory = config.distill.teacher
    if directory is None:
        return
    check_vocabulary(config.model, read_pretrained_model_config(directory), directory)
    folder = Path(directory) / "tokenizer"
    if is_run(directory) and folder.is_dir() and load_tokenizer(folder).hash != tokenizer.hash:
        raise ConfigError(
            f"distill.teacher: {directory} was trained with another tokenizer, so that its ids mean other texts; train "
            f"the student with it: data.tokenizer={{name: file, path: {folder}}}."
        )


def load_teacher(config: RunConfig, trainer: Trainer, report: Callable[[str], None]) -> None:
    """Read the parameters of the teacher model of distillation, if any, into the trainer.

    Args:
      config: configuration of the run.
      trainer: its trainer, before its state is used.
      report: called with a line that names the teacher.
    """
    directory = config.distill.teacher
    if directory is None:
        return
    _, wanted = trainer.start_shapes

    def name(line):
        return report(line.replace("starting from", "distilling from", 1))

    trainer.set_teacher(initial_parameters(directory, read_pretrained_model_config(directory), wanted, name))
