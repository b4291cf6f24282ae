"""Evaluate a trained run or a Hugging Face checkpoint: loss on held-out text, and lm-evaluation-harness tasks.

The tasks of `train.eval_tasks` are also evaluated during training.
"""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import jax

from jaxstack.data.build_shards import available_cores
from jaxstack.data.config import SourceConfig, TokenizerConfig
from jaxstack.data.loader import Data, open_data
from jaxstack.data.read_documents import Piece, read_records
from jaxstack.data.streams import is_prepared_source
from jaxstack.data.tokenization_plan import KIND_OF_SUFFIX, source_files
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Params
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.text_stream import TextGenerator
from jaxstack.distill import DistillConfig
from jaxstack.distributed.coordination import process_position
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.evaluation import bits_per_byte
from jaxstack.parallel import ParallelConfig
from jaxstack.preference import PreferenceConfig
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.run.build import make_trainer
from jaxstack.run.load import check_finite, load, run_config, sets_layout
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
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


TaskMetrics = Mapping[str, Mapping[str, float]]
"""Task -> metric -> value; `<metric>_stderr` is the standard error of a metric."""


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Options of an evaluation on held-out text: which files, and how many tokens of them.

    Attributes:
      paths: files, directories or globs; empty: the run's own held-out text.
      text_key: JSON key or Parquet column that holds the text.
      max_tokens: token limit; default: all.
    """

    paths: Sequence[str] = ()
    text_key: str = "text"
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of an evaluation on lm-evaluation-harness tasks: which tasks, few-shot examples, limits.

    Attributes:
      names: task names, or paths of task files.
      include_path: directory with additional task files.
      num_fewshot: examples before each question; default: as the task defines.
      limit: maximum number of questions per task; default: all.
      batch_size: sequences per batch.
      max_length: token limit of a sequence; default: the model's context, or the training sequence length.
      document_start: begin each text with the tokenizer's document-start id, as in training.
    """

    names: Sequence[str]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 16
    max_length: int | None = None
    document_start: bool = True


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """Result of evaluating a model on held-out text: loss, perplexity and bits per byte.

    Attributes:
      loss: mean cross-entropy, nats per token.
      tokens: number of tokens.
      bytes: size of the text that the tokens encode; 0 if unknown.
      row_length: tokens of a row; a token sees those before it in its row, so that the loss depends on it.
      perplexity: exp(loss).
      bits_per_byte: loss in bits per byte of text; None if the size of the text is unknown.
      seconds: time of the evaluation.
    """

    loss: float
    tokens: float
    bytes: int
    row_length: int
    perplexity: float
    bits_per_byte: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of evaluating a model on held-out text and on tasks.

    Attributes:
      step: step of the checkpoint; 0 for a Hugging Face checkpoint.
      text: loss on held-out text; None if it was not asked for.
      tasks: metrics of each task; None without tasks.
      harness_results: everything that the harness reports, as plain data; empty without tasks.
    """

    step: int
    text: TextLoss | None = None
    tasks: TaskMetrics | None = None
    harness_results: Mapping[str, object] = dataclasses.field(default_factory=dict, repr=False)


def evaluate(
    directory: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    text: TextOptions | None = None,
    tasks: TaskOptions | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Evaluate a trained run or a Hugging Face checkpoint on held-out text and on tasks.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      overrides: `parallel.key=value` and `precision.key=value`.
      step: step of the checkpoint to evaluate; default: the newest.
      text: held-out text to compute the loss on; default: the run's own, unless `tasks` are given.
      tasks: harness tasks to run.
      report: called with each warning, and each line of progress while data is prepared.

    Raises:
      ConfigError: an argument is wrong, or the harness is not installed or has no such task.
      JaxstackError: there is no checkpoint or no held-out text, or a task cannot be loaded.
    """
    stored = StoredModel.open(directory, report)
    config = run_config(stored, overrides)
    if tasks is None and text is None:
        text = TextOptions()
    if tasks is None and text is not None and not text.paths and not stored.held_out_text:
        raise ConfigError(f"{directory} has no held-out text of its own: give --data or --tasks.")
    harness = import_harness() if tasks is not None else None
    result = None
    if text is not None:
        chosen, loss = _text_loss(config, stored, text, step, sets_layout(overrides), report)
        result = Evaluation(chosen, loss)
    if tasks is not None and harness is not None:
        found = _run_tasks(harness, directory, overrides, tasks, step, report)
        result = found if result is None else dataclasses.replace(found, text=result.text)
    assert result is not None
    return result


def _text_loss(
    config: RunConfig,
    stored: StoredModel,
    text: TextOptions,
    step: int | None,
    layout_chosen: bool,
    report: Callable[[str], None],
) -> tuple[int, TextLoss]:
    """Evaluate a checkpoint on held-out text; return the checkpoint's step and the loss."""
    if stored.packed:
        degrees = config.parallel.degrees.items()
        split = [axis for axis, degree in degrees if degree != 1 and axis not in ("data", "tensor")]
        if layout_chosen and split:
            raise ConfigError(
                f"parallel.{split[0]} would split a compressed model so that each device gathers weights, which packed"
                " ones are not, to compute its loss; set parallel.data and parallel.tensor only, or leave parallel.*"
                " out for one device."
            )
        if not layout_chosen:  # on one device, or on all if several processes have one each
            every = -1 if process_position()[1] > 1 else 1
            parallel = ParallelConfig(data=every, simulate_devices=config.parallel.simulate_devices)
            config = config.model_copy(update={"parallel": parallel})
        layout_chosen = True
    config = Setting.of(config, "evaluate", chosen=layout_chosen).config
    trainer, data = open_evaluation(config, stored, text, report)
    params, non_params = stored.read_state(trainer.module, trainer.rules, step)
    check_finite(params, stored)
    return stored.choose_step(step), measure_loss(trainer, data, params, non_params, text.max_tokens)


def on_one_device(config: RunConfig) -> RunConfig:
    """Return a run's configuration with the parallel layout replaced by that of a single device."""
    simulated = config.parallel.simulate_devices
    return config.model_copy(update={"parallel": ParallelConfig(simulate_devices=simulated)})


def open_evaluation(
    config: RunConfig, stored: StoredModel, text: TextOptions, report: Callable[[str], None]
) -> tuple[Trainer, Data]:
    """Open the held-out text to evaluate a model on; return a trainer for the evaluation, and the text.

    Args:
      config: configuration with a resolved layout.
      stored: the model on disk, which has the tokenizer.
      text: the text; without paths the run's own.
      report: called with each line of progress while data is prepared.

    Raises:
      ConfigError: the tokenizer is another model's.
    """
    # No checkpoint holds a teacher, and the text has neither pairs of answers nor sampled ones.
    losses = {"distill": DistillConfig(), "preference": PreferenceConfig(), "policy": PolicyConfig()}
    config = config.model_copy(update=losses)
    data = _open_text(config, stored, text, report)
    rows = config.model.vocab_size or 0
    if data.tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.vocab_size} ids, but the model's vocabulary has only {rows}: the "
            "tokenizer is another model's."
        )
    return make_trainer(config, data, jax.devices()[: math.prod(config.parallel.degrees.values())]), data


def measure_loss(
    trainer: Trainer, data: Data, params: Params, non_params: Params, max_tokens: int | None = None
) -> TextLoss:
    """Return loss, perplexity and bits per byte of model parameters on the held-out text of `open_evaluation`.

    Raises:
      JaxstackError: there is no held-out text.
    """
    values = trainer.evaluator.run(params, non_params, max_tokens, _goes_on)
    if values is None:
        raise JaxstackError("there is no held-out text to evaluate on; give some with --data.")
    size = len(data.held_out_bytes(max_tokens))
    values |= bits_per_byte(values, size)
    return TextLoss(
        loss=values["eval_loss"],
        tokens=values["eval_items"],
        bytes=size,
        row_length=data.sequence_length,
        perplexity=values["eval_perplexity"],
        bits_per_byte=values.get("eval_bits_per_byte"),
        seconds=values["eval_seconds"],
    )


def _goes_on() -> bool:
    """Give the launcher a sign of life after a batch; return False, as nothing stops an evaluation."""
    ProgressFile.of_this_process().alive()
    return False


def _source_of(path: str, text_key: str) -> SourceConfig:
    """Return the data source of a path to evaluate on: chats if its first jsonl record is one, text otherwise."""
    source = SourceConfig(path=path, text_key=text_key)
    if not is_prepared_source(source):
        first = next((file for file in source_files(source) if KIND_OF_SUFFIX.get(file.suffix) == "jsonl"), None)
        record = next((record for record, _, _ in read_records(Piece("jsonl", first))), {}) if first else {}
        if text_key not in record and ("messages" in record or {"prompt", "completion"} <= record.keys()):
            return SourceConfig(path=path, format="chat")
    return source


def _open_text(config: RunConfig, stored: StoredModel, text: TextOptions, report: Callable[[str], None]) -> Data:
    """Open text to evaluate on: the given paths, tokenized with the model's tokenizer, or the run's own data."""
    section = config.data
    if text.paths:
        assert stored.tokenizer  # reports a missing one before any text is prepared
        section = section.model_copy(
            update={
                "held_out": tuple(map(functools.partial(_source_of, text_key=text.text_key), text.paths)),
                "sources": (SourceConfig(path="synthetic"),),  # no training text is read
                "tokenizer": TokenizerConfig(name="file", path=str(stored.tokenizer_folder)),
            }
        )
    length = config.train.sequence_length
    seed = config.run.seed
    try:
        return open_data(section, sequence_length=length, seed=seed, report=report, workers=available_cores())
    except ConfigError as error:
        if text.paths:
            raise
        own = f"the run's own held-out text cannot be read here: {str(error).removesuffix('.')}"
        raise ConfigError(f"{own}; or give other text with --data.") from None


def _run_tasks(
    harness: ModuleType,
    directory: str | Path,
    overrides: Sequence[str],
    tasks: TaskOptions,
    step: int | None,
    report: Callable[[str], None],
) -> Evaluation:
    manager = harness.make_task_manager(tasks.names, tasks.include_path)
    run = load(directory, overrides, step=step, report=report)
    longest = run.config.model.max_position_embeddings
    length = tasks.max_length or default_max_length(run.config)
    if longest is not None and length > longest:
        raise ConfigError(f"--max-length {length} exceeds the model's max_position_embeddings ({longest}).")
    generator = run.text_generator(document_start=tasks.document_start)
    signs = ProgressFile.of_this_process()
    alive = (lambda done: signs.alive()) if signs.is_read else None  # else it shows its progress
    model = harness.HarnessModel(generator, max_length=length, batch_size=tasks.batch_size, report=alive)
    results = harness.run_tasks(model, tasks.names, num_fewshot=tasks.num_fewshot, limit=tasks.limit, manager=manager)
    return Evaluation(run.step, tasks=harness.task_metrics(results), harness_results=results)
