"""Train a language model from its configuration: connect the processes, prepare data, train, and summarize."""

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxstack.checkpoint import compressed
from jaxstack.checkpoint.directory import link_checkpoint
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.compress.during_training import check_start, describe_compression
from jaxstack.config.loader import dump_yaml, load_yaml
from jaxstack.cost_model.roofline import describe_roofline, find_peak
from jaxstack.cost_model.search import describe_degrees
from jaxstack.data.batch_ramp import BatchSizes
from jaxstack.data.build_shards import available_cores
from jaxstack.data.loader import Data, open_data
from jaxstack.data.streams import is_chat
from jaxstack.distributed.coordination import all_true, is_first
from jaxstack.errors import ConfigError, JaxstackError, cannot_write, is_full
from jaxstack.evaluation import bits_per_byte, compression_baselines
from jaxstack.files import write_file
from jaxstack.heartbeat import doing, silence
from jaxstack.loop import LoopSettings
from jaxstack.models import (
    count_parameters,
    flops_saved_per_token,
    model_flops_per_token,
)
from jaxstack.models.count import describe_flops
from jaxstack.models.low_precision import describe_fp8
from jaxstack.module_arrays import packed_base
from jaxstack.observe.number_format import plural
from jaxstack.preference import LOSSES
from jaxstack.run.build import CompileAhead, make_trainer, resolve_model
from jaxstack.run.companions import companions
from jaxstack.run.evaluate import TrainingTasks
from jaxstack.run.join import join_job
from jaxstack.run.load import start_parameters
from jaxstack.run.memory_check import check_memory, check_state_size
from jaxstack.run.reference import add_references
from jaxstack.run.setting import Setting, forecast_here
from jaxstack.run.verify_layout import check_layout
from jaxstack.run_config import RunConfig, config_from_tree, load_config
from jaxstack.stored import StoredModel
from jaxstack.stored.model import copy_stop_tokens
from jaxstack.stored.packed_base import PackedModel, keep_packed_base
from jaxstack.trainer import Trainer

_SAME_RATE = 0.01
"""Relative difference of two learning rates below which they count as equal."""
_MANY_LAYERS = 200
"""Number of unrolled layers above which a note says that tracing and compiling them takes long."""


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """Result of training: the finished run's directory, completed configuration and last logged metrics.

    Attributes:
      directory: the run directory; `jaxstack.run.load.load(directory)` opens it.
      config: the configuration with its layout and vocabulary filled in.
      metrics: the values that were logged last, with `eval_loss` if there is held-out text, and `final_eval_loss` if
        evaluations during training were limited to a part of it.
    """

    directory: Path
    config: RunConfig
    metrics: Mapping[str, float]


def print_line(text: str) -> None:
    """Print a line and flush the output, so that it appears at once even when piped."""
    print(text, flush=True)


class Task:
    """Data, trainer and evaluations of a run. This class is for texts, chats and pairs of answers."""

    def __init__(self) -> None:
        self._baselines: _ByteBaselines | None = None

    def check(self, config: RunConfig) -> None:
        """Check settings that need neither devices nor data.

        Raises:
          ConfigError: a setting is not one of this task.
        """
        if config.policy.loss is not None:
            raise ConfigError(
                f"policy.loss ({config.policy.loss}) trains on answers that the model samples: run python -m "
                "jaxstack.reinforce, or remove it."
            )
        _check_preference(config)

    def open(self, config: RunConfig, say: Callable[[str], None]) -> Any:
        """Open the data, such as `jaxstack.data.loader.Data`."""
        return open_data(
            config.data,
            sequence_length=config.train.sequence_length,
            seed=config.run.seed,
            report=say,
            workers=available_cores(),
            mismatched=config.preference.method.mismatched,
        )

    def make_trainer(self, config: RunConfig, data: Any, base: PackedModel | None) -> Trainer:
        """Make the trainer of a run whose layout and vocabulary are known; the weights of `base` stay packed."""
        return make_trainer(config, data, base=base)

    def settings(self, config: RunConfig, data: Any) -> dict[str, Any]:
        """Return further fields of `LoopSettings`."""
        predicted = forecast_here(config)
        found = {"forecast": predicted and predicted.describe()}
        if data.pairs:  # they are compared, not predicted
            return found
        self._baselines = _ByteBaselines(data)
        return {**found, "describe_evaluation": self._baselines.describe}

    def summarize(self, config: RunConfig, values: Mapping[str, float], say: Callable[[str], None]) -> None:
        """Report the result of a run, and the command that generates text or, for a reward model, how to score it."""
        if self._baselines is not None:
            _compare_with_compressors(values, self._baselines, say)
        if config.preference.loss == "reward_model":
            say(f"next: jaxstack.run.load.load_reward_model({str(config.directory)!r}) gives rewards to texts")
            return
        chats = all(is_chat(source) for source in config.data.sources) and config.data.chat.template != "none"
        prompt = '--chat --prompt "..."' if chats else '--prompt "def "'
        say(f"next: python -m jaxstack.generate --run {shlex.quote(str(config.directory))} {prompt}")

    def close(self) -> None:
        """End what the task has started."""
        return


def train(
    config: RunConfig | str | Path,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = print_line,
    task: Task | None = None,
) -> TrainedRun:
    """Train the run that a configuration describes, or resume it from its newest checkpoint.

    Args:
      config: the run's configuration, from `load_config`, or the YAML file that holds it. A parallel degree of -1 and a
        vocabulary of None are filled in.
      overrides: `section.key=value` for the values of a file to replace.
      report: called with each line of progress, on the first process, unless `observe.progress` is off.
      task: what the run learns from; None: `Task()`.

    Returns:
      The run with the values that were logged last.

    Raises:
      ConfigError: the configuration cannot run here.
      JaxstackError: the run failed, or was stopped by a signal after saving.
    """
    if not isinstance(config, RunConfig):
        config = load_config(config, overrides)
    task = task or Task()
    _check_settings(config)
    task.check(config)
    warnings = join_job(config.model_dump(mode="json", by_alias=True), config.resilience)
    setting = Setting.of(config, "train")
    say = _reporter(config, report)
    _announce(config, setting, warnings, say)
    asked = config
    config = setting.config
    check_state_size(config)
    branch(config, say)
    _note_many_layers(config, say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(task))
        config, data = _open_data(task, config, say)
        check_layout(config, say, resized=bool(setting.change))
        base, trainer = _make_trainer(task, config, data, say)
        flops = _describe(config, data, trainer, say)
        _load_frozen(config, base, trainer, say)
        tasks = TrainingTasks(config, trainer, data.tokenizer)
        ahead = None
        if config.resilience.compile_ahead and config.policy.loss is None:  # which makes a plain `Trainer`
            asked = asked.model_copy(update={"model": config.model})
            ahead = stack.enter_context(contextlib.closing(CompileAhead(asked, data, say)))
        settings = LoopSettings(
            checkpoint=config.checkpoint,
            observe=config.observe,
            resilience=config.resilience,
            flops_per_token=flops,
            planned=_planned(config),
            settings=config.model_dump(mode="json", by_alias=True),
            run_tasks=tasks.run,
            on_start=lambda: _write_run_files(config, data, base, keep=bool(setting.change)),
            on_new_run=lambda: _start_from(config, trainer, say),
            after_first_steps=None if ahead is None else ahead.start,
            say=say,
        )
        values = trainer.fit(config.directory, dataclasses.replace(settings, **task.settings(config, data)))
        for line in describe_compression(trainer.module, trainer.state.params):
            say(line)
        if jax.process_index() == 0:
            task.summarize(config, values, say)
    return TrainedRun(config.directory, config, values)


def _reporter(config: RunConfig, report: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that reports a line: `report` on the first process, unless `observe.progress` is off."""
    if jax.process_index() == 0 and config.observe.progress:
        return report
    silence()
    return lambda text: None


def _announce(config: RunConfig, setting: Setting, warnings: Sequence[str], say: Callable[[str], None]) -> None:
    """Report what is to be known of the devices and their layout before the run prepares."""
    for line in warnings:
        say(f"warning: {line}")
    if config.parallel.auto:
        say(f"parallel: auto chose {describe_degrees(setting.config)}")
    if setting.change:
        say(f"going on with fewer processes and the same global batch: {setting.change}")


def _open_data(task: Task, config: RunConfig, say: Callable[[str], None]) -> tuple[RunConfig, Any]:
    """Open the data of a run, and check what they must have in common with its models and its layout.

    Returns:
      The configuration with the vocabulary filled in, and the data.
    """
    with doing("reading the data"):
        data = task.open(config, say)
    config = config.model_copy(update={"model": resolve_model(config.model, data.vocab_size)})
    for companion in companions(config):
        companion.check(config.model, data.tokenizer)
    add_references(config, data, say)
    return config, data


def _make_trainer(
    task: Task, config: RunConfig, data: Any, say: Callable[[str], None]
) -> tuple[PackedModel | None, Trainer]:
    """Return the model whose weights stay packed, if there is one, and the trainer, whose state fits the devices."""
    with doing("tracing the model"):
        base = config.packed_base(say)
        trainer = task.make_trainer(config, data, base)
    if warning := check_memory(trainer):
        say(f"warning: {warning}")
    return base, trainer


def _load_frozen(config: RunConfig, base: PackedModel | None, trainer: Trainer, say: Callable[[str], None]) -> None:
    """Read the weights that are not trained into the trainer: those of companions, and those that stay packed."""
    for companion in companions(config):
        companion.load(trainer, say)
    if base is not None:
        say(f"{len(base.weights)} weights of {base.directory} stay packed")
        found = compressed.read_compressed(base.directory, wanted=base.weights.__contains__)[0]
        trainer.load_unsaved(packed_base.packed_arrays(compressed.named_leaves(found)))


def _check_settings(config: RunConfig) -> None:
    """Check what needs neither devices nor data, before either is prepared.

    Raises:
      ConfigError: a setting is not one of training, or there is no model to start from.
    """
    if config.precision.kv_cache != "none":
        raise ConfigError(
            f"precision.kv_cache ({config.precision.kv_cache}) is a setting of trained models; leave it out, and give "
            "it to jaxstack generate, evaluate or serve."
        )
    if config.run.init_from is not None and not CheckpointManager(config.directory / "checkpoints").all_steps():
        StoredModel.open(config.run.init_from)


def _note_many_layers(config: RunConfig, say: Callable[[str], None]) -> None:
    if not config.model.scan_layers and config.model.num_layers > _MANY_LAYERS:
        say(
            f"note: model.scan_layers is false, so each of the {config.model.num_layers:,} layers is traced and "
            "compiled by itself, which can take many minutes; model.scan_layers=true compiles one layer"
        )


def _describe(config: RunConfig, data: Any, trainer: Trainer, say: Callable[[str], None]) -> float:
    """Report the model, devices and layout that will run; return the model FLOPs per token."""
    frozen = trainer.frozen_parameters()
    model = config.model
    used = frozen
    if not config.train.mtp_loss_weight:  # the layers for multi-token prediction are not computed
        model = model.model_copy(update={"num_nextn_predict_layers": 0})
        used = {path: known for path, known in frozen.items() if not path.startswith("mtp/")}
    flops = model_flops_per_token(model, config.train.sequence_length) - flops_saved_per_token(model, used)
    say(_describe_run(config, data, flops, bool(frozen)))
    if frozen:
        _, added = trainer.module.split_added(trainer.module.abstract_params)
        total = count_parameters(config.model).total + sum(math.prod(x.shape) for x in jax.tree.leaves(added))
        say(_describe_frozen(total, sum(math.prod(shape) for _, shape in frozen.values())))
    return flops


def _planned(config: RunConfig) -> dict[str, Any]:
    """Return the roofline model of the run's operators, for its report; {} if the device's peak rates are unknown."""
    peak = find_peak(jax.devices()[0].device_kind)
    return {} if peak is None else {"roofline": describe_roofline(config.one_worker, peak)}


def _start_from(config: RunConfig, trainer: Trainer, say: Callable[[str], None]) -> None:
    """Load the parameters that `run.init_from` names, if it is set, into the trainer of a new run."""
    source = config.run.init_from
    if source is not None:
        shapes = trainer.start_shapes[0]
        direct = config.run.direct_storage
        params = start_parameters(source, config.model, shapes, say, direct_storage=direct)
        check_start(trainer.module, params)
        trainer.start_from(params)


def _write_run_files(config: RunConfig, data: Any, base: PackedModel | None, *, keep: bool) -> None:
    """Write the configuration and the tokenizer into the run directory.

    Args:
      config: the configuration, with its layout.
      data: what has the tokenizer.
      base: the compressed model whose weights stay packed, which is linked into the run directory.
      keep: keep a configuration that is there, which has the layout of all processes.
    """
    directory = config.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (keep and (directory / "config.yaml").exists()):
            write_file(directory / "config.yaml", dump_yaml(config).encode())
        data.tokenizer.save(directory / "tokenizer")
        if base is not None:
            keep_packed_base(base, directory)
        if config.run.init_from is not None and (source := StoredModel.find(Path(config.run.init_from))) is not None:
            copy_stop_tokens(source, directory)
    except OSError as error:
        if is_full(error):  # which a run that goes on waits for
            raise
        raise cannot_write(f"the run directory {directory}", error) from None


def _describe_frozen(total: int, frozen: int) -> str:
    trained = total - frozen
    return f"{trained:,} parameters are trained ({trained / total:.2%}); {frozen:,} are frozen, without optimizer state"


def _describe_run(config: RunConfig, data: Any, flops: float, frozen: bool) -> str:
    """Return the lines printed at the start of a run: model, devices, layout, tokens, FLOPs per token."""
    count = count_parameters(config.model)
    degrees = {axis: degree for axis, degree in config.parallel.degrees.items() if degree > 1}
    layout = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one device"
    layout = f"{config.parallel.workers} workers of {layout}" if config.parallel.workers > 1 else layout
    device = jax.devices()[0]
    sizes = BatchSizes(config.train)
    sequences = config.preference.method.rows if config.data.pairs else 1
    tokens = sizes.rows_before(config.train.steps) * sequences * config.train.sequence_length
    name = config.model.preset or "model"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    compute = config.precision.compute_dtype(device.platform)
    fp8 = describe_fp8(config.model, config.precision, staged=config.parallel.pipeline > 1)
    active = f"{count.active:,} per token, " if count.active != count.total else ""
    return (
        f"{name}: {count.total:,} parameters ({active}{count.embedding:,} in the embedding), "
        f"{plural(config.model.num_layers, 'layer')}; "
        f"{compute} compute{fp8 and f', {fp8},'} on {jax.device_count()} x {device.device_kind} ({layout}){processes}\n"
        f"{plural(config.train.steps, 'step')} of {sizes.describe()}{f' pairs x {sequences}' * config.data.pairs} x "
        f"{config.train.sequence_length} tokens = {tokens:,} tokens; "
        f"{data.describe()}; "
        f"{flops / 1e6:,.1f} model MFLOP per token ({describe_flops(config.model)}"
        f"{', without the gradients of frozen weights' * frozen})"
    )


class _ByteBaselines:
    """Computes bits per byte of the held-out text, for the model and for the compressors gzip and xz as baselines."""

    def __init__(self, data: Data):
        self._data = data
        self._full_text: bytes | None = None

    def describe(self, values: Mapping[str, float], max_tokens: int | None) -> dict[str, float]:
        """Return an evaluation's perplexity, and its bits per byte if the held-out text's size in bytes is known."""
        raw = self._data.held_out_bytes(max_tokens)
        self._full_text = raw if max_tokens is None else self._full_text
        return bits_per_byte(values, len(raw))

    def compressors(self) -> dict[str, float]:
        """Return the bits per byte of `gzip -9` and `xz -9` on the last fully evaluated text; {} if there is none."""
        return compression_baselines(self._full_text) if self._full_text else {}


def _compare_with_compressors(
    values: Mapping[str, float], baselines: _ByteBaselines, say: Callable[[str], None]
) -> None:
    """Report the final bits per byte of the model and of gzip and xz."""
    bits = values.get("final_eval_bits_per_byte", values.get("eval_bits_per_byte"))
    if bits is not None:
        with doing("compressing the held-out text with gzip and xz"):
            compressors = baselines.compressors()
        others = ", ".join(f"{name}: {value:.4f}" for name, value in compressors.items())
        say(f"bits per byte on the held-out text: {bits:.4f} (jaxstack)" + (f", {others}" if others else ""))


def _check_preference(config: RunConfig) -> None:
    """Check that data and settings are those of training on preferences, or none of them is.

    Raises:
      ConfigError: something is missing, or does not go with it.
    """
    preference = config.preference
    loss = preference.loss
    if loss is None:
        if config.data.pairs:
            raise ConfigError(f"data of format preference need a loss; set preference.loss to {', '.join(LOSSES)}.")
        return
    if not config.data.pairs:
        raise ConfigError(
            f"preference.loss ({loss}) compares pairs of answers; give sources of them, data.sources=[{{path: FILE, "
            "format: preference}], or remove preference.loss."
        )
    if preference.method.needs_reference and preference.reference == "init_from" and config.run.init_from is None:
        raise ConfigError(
            f"preference.loss ({loss}) compares with the model that the run starts from; set run.init_from to it, or "
            "preference.reference to another model's directory."
        )
    if any(rule.dropout for rule in config.adapters.rules):
        raise ConfigError("preference.loss does not support dropout; set the dropout of all adapters.rules to 0.")
    if config.train.z_loss:
        raise ConfigError(f"preference.loss does not support train.z_loss ({config.train.z_loss}); remove it.")


def branch(config: RunConfig, report: Callable[[str], None]) -> None:
    """Link the checkpoint that `run.branch_from` names as the first one of a new run; do nothing if the key is not set.

    Every process of the run calls it; the first one does the work.

    Args:
      config: the run's configuration.
      report: called with a line that names the checkpoint, and with one if the learning rate jumps there.

    Raises:
      ConfigError: there is no such checkpoint, or it is not before the run's last step.
      JaxstackError: it is damaged, or cannot be copied.
    """
    if config.run.branch_from is None:
        return
    failure: JaxstackError | None = None
    if is_first():
        try:
            _branch(config, Path(config.run.branch_from), report)
        except JaxstackError as error:
            failure = error
    if not all_true(failure is None):
        raise failure or ConfigError("the first process cannot branch from run.branch_from; it says why.")


def _branch(config: RunConfig, source: Path, report: Callable[[str], None]) -> None:
    target = config.directory / "checkpoints"
    if CheckpointManager(target).all_steps():
        return  # the run has begun: it continues from its own checkpoints
    step = link_checkpoint(source / "checkpoints", config.run.branch_step, target, config.train.steps)
    report(f"branching from {source}, step {step}")
    before = config_from_tree(load_yaml(source / "config.yaml"), str(source / "config.yaml"))
    old = learning_rate_at(before, step)
    new = learning_rate_at(config, step)
    if abs(new - old) > _SAME_RATE * old:
        report(
            f"warning: the learning rate jumps at step {step}, from {old:.3g} to {new:.3g}: a decay that begins there "
            f"has schedule.decay_steps = train.steps - {step}"
        )


def learning_rate_at(config: RunConfig, step: int) -> float:
    """Return the learning rate that a run's configuration schedules for a step, counted from 0."""
    multiplier = config.schedule.make_multiplier(config.train.steps)
    return config.optimizer.learning_rate * float(multiplier(step))
