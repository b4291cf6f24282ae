"""Evaluates lm-evaluation-harness tasks during training, as `train.eval_tasks` configures."""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import jax

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Params
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.text_stream import TextGenerator
from jaxstack.errors import ConfigError
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from jaxstack.decoding.harness import HarnessModel


def import_harness() -> ModuleType:
    """Import and return the adapter to lm-evaluation-harness; raise ConfigError if the harness is not installed.

    Raises:
      ConfigError: the lm-evaluation-harness is not installed.
    """
    if not sys.stderr.isatty():  # progress bars are for terminals
        for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    try:
        from jaxstack.decoding import harness
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lm_eval"):
            raise
        raise ConfigError("tasks need the lm-evaluation-harness: pip install 'jaxstack[eval]'.") from None
    return harness


def default_max_length(config: RunConfig) -> int:
    """Return the token limit of evaluation sequences: the model's context length, or else `train.sequence_length`."""
    return config.model.max_position_embeddings or config.train.sequence_length


class TrainingTasks:
    """Runs the lm-evaluation-harness tasks of `train.eval_tasks` on the current parameters during training.

    Args:
      config: configuration of the run.
      trainer: its trainer, whose state is read at each evaluation.
      tokenizer: its tokenizer.

    Raises:
      ConfigError: the harness is not installed, or has no such task.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, tokenizer: Tokenizer):
        self._config = config
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._harness: ModuleType | None = None
        self._manager: TaskManager | None = None
        self._model: HarnessModel | None = None
        if config.train.eval_tasks:
            self._harness = import_harness()
            self._manager = self._harness.make_task_manager(config.train.eval_tasks)

    def run(self, report_alive: Callable[[], None]) -> dict[str, float]:
        """Run all tasks on the current parameters; return metrics named `eval_<task>_<metric>`.

        Args:
          report_alive: called after each batch, as a sign of life for the launcher.
        """
        if self._harness is None:
            return {}
        train = self._config.train
        state = self._trainer.state
        if self._model is None:
            self._model = self._make_model(self._harness, report_alive)
        else:
            self._model.generator.decoder.load(_exported(self._trainer), state.non_params)
        found = self._harness.run_tasks(
            self._model, train.eval_tasks, limit=train.eval_tasks_limit, manager=self._manager
        )
        self._model.generator.decoder.unload()
        metrics = self._harness.task_metrics(found)
        return {f"eval_{task}_{name}": value for task, numbers in metrics.items() for name, value in numbers.items()}

    def _make_model(self, harness: ModuleType, report_alive: Callable[[], None]) -> "HarnessModel":
        train = self._config.train
        trainer = self._trainer
        state = self._trainer.state
        vocab_size = self._tokenizer.vocab_size
        start = self._tokenizer.document_start
        params = _exported(trainer)
        decoder = Decoder(trainer.module.used, params, state.non_params, trainer.rules, vocab_size=vocab_size)
        return harness.HarnessModel(
            TextGenerator(decoder, self._tokenizer, [start], [start]),
            max_length=default_max_length(self._config),
            batch_size=train.eval_batch_size or train.global_batch_size // train.gradient_accumulation,
            report=lambda done: report_alive(),
        )


def _exported(trainer: Trainer) -> Params:
    """Return the trainer's current parameters; weights trained in compressed form become plain arrays."""
    module = trainer.module
    params = trainer.state.params
    return params if module.used is module else jax.jit(module.load)(params)
