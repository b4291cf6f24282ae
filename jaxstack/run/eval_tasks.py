"""Tasks of the lm-evaluation-harness while a model trains: `train.eval_tasks`."""

import os
import sys
from collections.abc import Callable
from typing import Any

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Decoder
from jaxstack.decoding.text import TextGenerator
from jaxstack.errors import ConfigError
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer


def open_harness() -> Any:
    """The module `jaxstack.decoding.harness`.

    Raises:
      ConfigError: the lm-evaluation-harness is not installed.
    """
    if not sys.stderr.isatty():  # its progress bars are for terminals
        for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    try:
        from jaxstack.decoding import harness
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lm_eval"):
            raise
        raise ConfigError("tasks need the lm-evaluation-harness: pip install 'jaxstack[eval]'.") from None
    return harness


def longest_sequence(config: RunConfig) -> int:
    """Tokens of a sequence in tasks: as many as the model has positions for, or as it was trained on."""
    return config.model.max_position_embeddings or config.train.sequence_length


class TrainingTasks:
    """The tasks of `train.eval_tasks`, run on the parameters that the trainer has at the time.

    Raises:
      ConfigError: the harness is not installed, or has no such task.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, tokenizer: Tokenizer):
        self._config, self._trainer, self._tokenizer = config, trainer, tokenizer
        self._harness: Any = None
        self._manager: Any = None
        self._model: Any = None
        if config.train.eval_tasks:
            self._harness = open_harness()
            self._manager = self._harness.find_tasks(config.train.eval_tasks)

    def run(self, alive: Callable[[], None]) -> dict[str, float]:
        """`eval_<task>_<metric>` of each; `alive` is called now and then."""
        if self._harness is None:
            return {}
        train, state = self._config.train, self._trainer.state
        if self._model is None:
            size, module = self._tokenizer.vocab_size, self._trainer.module
            decoder = Decoder(module, state.params, state.non_params, self._trainer.rules, vocab_size=size)
            start = self._tokenizer.document_start
            size = train.eval_batch_size or train.global_batch_size // train.gradient_accumulation
            self._model = self._harness.HarnessModel(
                TextGenerator(decoder, self._tokenizer, [start], [start]),
                max_length=longest_sequence(self._config),
                batch_size=size,
                report=lambda done: alive(),
            )
        else:
            self._model.generator.decoder.load(state.params, state.non_params)
        tasks, limit = train.eval_tasks, train.eval_tasks_limit
        found = self._harness.run_tasks(self._model, tasks, limit=limit, manager=self._manager)
        self._model.generator.decoder.unload()
        metrics = self._harness.task_metrics(found)
        return {f"eval_{task}_{name}": value for task, numbers in metrics.items() for name, value in numbers.items()}
