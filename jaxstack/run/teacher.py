"""Loads the teacher model of distillation from the directory that `distill.teacher` names."""

from collections.abc import Callable

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.distill import check_vocabulary
from jaxstack.errors import ConfigError
from jaxstack.run.load import start_parameters
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.trainer import Trainer


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that the teacher model of distillation, if any, has the student's vocabulary and tokenizer.

    Raises:
      ConfigError: the directory holds no model, or one with another vocabulary or tokenizer.
    """
    directory = config.distill.teacher
    if directory is None:
        return
    teacher = StoredModel.open(directory)
    check_vocabulary(config.model, teacher.model, directory)
    folder = teacher.tokenizer_folder
    # A run has the tokenizer that it was trained with; another program's may differ in what does not change the ids.
    if not teacher.exported and teacher.has_tokenizer and teacher.tokenizer.hash != tokenizer.hash:
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
    wanted = trainer.start_shapes[1]["teacher"]
    model = StoredModel.open(directory).model
    trainer.load_companion("teacher", start_parameters(directory, model, wanted, report, verb="distilling"))
