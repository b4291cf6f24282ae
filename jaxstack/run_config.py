"""The one composed configuration tree of a run. Nothing below this file sees it; every part gets its own section."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, field_validator, model_validator

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, load_yaml, merge_overrides, merge_trees
from jaxstack.data.config import DataConfig
from jaxstack.errors import ConfigError
from jaxstack.models.adapters import AdapterConfig
from jaxstack.models.config import ModelConfig
from jaxstack.models.preset import load_preset
from jaxstack.models.pretrained import fill_in
from jaxstack.observe.config import ObserveConfig
from jaxstack.optim.optimizers import AdamW, AnyOptimizer
from jaxstack.optim.schedules import AnySchedule, Cosine
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.pipeline.plan import PipelinePlan, plan_pipeline
from jaxstack.parallel.pipeline.stages import StageLayout
from jaxstack.plan.nearest import nearest_degrees
from jaxstack.precision.config import PrecisionConfig
from jaxstack.resilience.config import ResilienceConfig


class RunSection(Component):
    """Where the run is kept, and its seed."""

    name: str = "run"
    """Folder of the run. Without it, a run from a file is called after the file."""
    dir: str = "runs"
    """The run directory is dir/name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of initial weights, data order and dropout."""
    init_from: str | None = None
    """A run directory or a Hugging Face checkpoint whose parameters, model and tokenizer a new run starts with."""

    @field_validator("init_from")
    @classmethod
    def _expand_home(cls, directory: str | None) -> str | None:
        return None if directory is None else str(Path(directory).expanduser())

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
            rule = "must be letters, digits, '.', '_' and '-', at most 200 of them, as it names a folder"
            raise ValueError(f"{rule}; found {name!r}.")
        return name


class TrainConfig(Component):
    """How long, on how much, and how a step is cut up."""

    steps: int = Field(default=1000, ge=1, le=999_999_999)
    """Optimizer steps of the whole run."""
    global_batch_size: int = Field(default=8, ge=1)
    """Sequences a step, over all devices and microbatches."""
    sequence_length: int = Field(default=256, ge=1)
    """Tokens a sequence."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Microbatches a step; memory falls, the result stays."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of log(Z)^2 in the loss."""
    eval_every_steps: int | None = Field(default=None, ge=1)
    """Held-out evaluation during training; left out: only at the end."""
    eval_batch_size: int | None = Field(default=None, ge=1)
    """Left out: global_batch_size / gradient_accumulation."""
    eval_tokens: int | None = Field(default=None, ge=1)
    """Of an evaluation during training; left out: all held-out tokens. The last evaluation always takes all."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks of the lm-evaluation-harness, by name or file, that every evaluation runs too."""
    eval_tasks_limit: int | None = Field(default=None, ge=1)
    """Questions of each task at most; left out: all."""
    xla_options: dict[str, bool | int | float | str] = {}
    """Options of XLA for the train step and evaluation, `xla_gpu_...: value`, beside ours. One that the installed
    jaxlib has under another name is translated, one that it has not is left out; both are said."""


class RunConfig(Component):
    """A whole run; `config.yaml` in its run directory repeats it."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: AnyOptimizer = AdamW()
    schedule: AnySchedule = Cosine()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    adapters: AdapterConfig = AdapterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        longest = self.model.max_position_embeddings
        if longest is not None and self.train.sequence_length > longest:
            raise ValueError(
                f"train.sequence_length ({self.train.sequence_length}) must not exceed model.max_position_embeddings "
                f"({longest}); shorten the one or raise the other."
            )
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) must not exceed train.steps "
                f"({self.train.steps}); lower the one or raise the other."
            )
        batch, pieces = self.train.global_batch_size, self.train.gradient_accumulation
        if batch % pieces:
            raise ValueError(
                f"train.global_batch_size ({batch}) must be divisible by train.gradient_accumulation ({pieces}); "
                f"nearest batch: {_near_multiples(batch, pieces)}."
            )
        remat, scanned, stages = self.model.remat, self.model.scan_layers, self.parallel.pipeline
        if self.parallel.prefetch and (not scanned or remat.endswith("offload") or stages > 1):
            raise ValueError(
                f"parallel.prefetch is for layers in a scan whose inputs stay on the device: it needs "
                f"model.scan_layers=true ({str(scanned).lower()}), a model.remat without offload ({remat}) and "
                f"parallel.pipeline=1 ({stages}); or leave it out, unrolled layers are gathered ahead without it."
            )
        if self.parallel.copy_engines == "always" and stages > 1:
            raise ValueError(
                f"parallel.copy_engines=always is for layouts without stages: it needs parallel.pipeline=1 ({stages}); "
                f"or leave it out."
            )
        if all(degree != -1 for degree in self.parallel.degrees.values()):
            problems = layout_problems(self)
            if problems:
                raise ValueError(" ".join([*problems, *_fitting_layout(self)]))
        return self

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run.dir) / self.run.name

    def pipeline_plan(self) -> PipelinePlan | None:
        """How the batch goes through the stages; None without a pipeline.

        Raises:
          ConfigError: the microbatches do not fit.
        """
        if self.parallel.pipeline == 1:
            return None
        return plan_pipeline(self.parallel, self.train.global_batch_size, self.train.gradient_accumulation)


def layout_problems(config: RunConfig) -> list[str]:
    """The rules between the model, the batch and a fully given layout that are broken, each with the way out."""
    problems = []
    parallel, model, train = config.parallel, config.model, config.train
    tensor, shards = parallel.tensor, parallel.data * parallel.fsdp * parallel.expert
    if model.num_heads % tensor:
        fits = [d for d in range(1, model.num_heads + 1) if model.num_heads % d == 0]
        problems.append(
            f"model.num_heads ({model.num_heads}) must be divisible by parallel.tensor ({tensor}); "
            f"tensor degrees that fit: {', '.join(map(str, fits))}."
        )
    elif model.kv_heads % tensor and tensor % model.kv_heads:
        fits = [d for d in range(1, model.num_heads + 1) if model.num_heads % d == 0]
        fits = [d for d in fits if model.kv_heads % d == 0 or d % model.kv_heads == 0]
        problems.append(
            f"model.num_kv_heads ({model.kv_heads}) and parallel.tensor ({tensor}) must divide one another; "
            f"tensor degrees that fit: {', '.join(map(str, fits))}."
        )
    if model.feed_forward_size % tensor and not all(map(model.is_mixture, range(model.num_layers))):
        problems.append(
            f"model.intermediate_size ({model.feed_forward_size}) must be divisible by parallel.tensor ({tensor}); "
            f"nearest: {_near_multiples(model.feed_forward_size, tensor)}."
        )
    problems += _expert_problems(model, parallel)
    unit = shards * train.gradient_accumulation
    expert, degree = ("expert x ", f"{parallel.expert} x ") if parallel.expert > 1 else ("", "")
    if train.global_batch_size % unit:
        problems.append(
            f"train.global_batch_size ({train.global_batch_size}) must be divisible by data x fsdp x "
            f"{expert}gradient_accumulation ({parallel.data} x {parallel.fsdp} x {degree}{train.gradient_accumulation} "
            f"= {unit}); "
            f"nearest: {_near_multiples(train.global_batch_size, unit)}."
        )
    evaluated = train.eval_batch_size
    if evaluated is not None and evaluated % shards:
        problems.append(
            f"train.eval_batch_size ({evaluated}) must be divisible by data x fsdp{' x expert' * bool(expert)} "
            f"({shards}); "
            f"nearest: {_near_multiples(evaluated, shards)}."
        )
    problems += _length_problems(config)
    if train.eval_tasks and (parallel.pipeline > 1 or parallel.context > 1):
        problems.append(
            f"train.eval_tasks needs parallel.pipeline and parallel.context of 1; found {parallel.pipeline} and "
            f"{parallel.context}; use jaxstack.evaluate on the checkpoints."
        )
    return problems or (_pipeline_problems(config) if parallel.pipeline > 1 else [])


def _length_problems(config: RunConfig) -> list[str]:
    """Of `layout_problems` those of a sequence that is split."""
    parallel, length = config.parallel, config.train.sequence_length
    problems = []
    if parallel.context > 1:
        problems += _context_problems(config)
    unit = parallel.context * parallel.tensor
    if parallel.sequence and length % unit:
        context = f" x parallel.context ({parallel.context})" if parallel.context > 1 else ""
        problems.append(
            f"train.sequence_length ({length}) must be divisible by parallel.tensor ({parallel.tensor}){context} with "
            f"parallel.sequence; nearest: {_near_multiples(length, unit)}."
        )
    return problems


def _context_problems(config: RunConfig) -> list[str]:
    parallel, model, length = config.parallel, config.model, config.train.sequence_length
    problems, context = [], parallel.context
    unit, method = 2 * context, None if parallel.context_method == "auto" else parallel.context_method
    if length % unit:
        problems.append(
            f"sequence_length {length} must be divisible by 2 x context parallel degree ({context}), as each device "
            f"holds an early and a late chunk; nearest: {_near_multiples(length, unit)}."
        )
    elif reason := model.attention.length_problem(length // unit):
        problems.append(f"{reason} (train.sequence_length {length} / (2 x parallel.context {context})).")
    if reason := model.attention.context_problem(method):
        problems.append(reason)
    elif model.num_heads % parallel.tensor:
        pass  # reported already
    elif model.attention.exchanges_heads(method) and (heads := model.num_heads // parallel.tensor) % context:
        fits = [d for d in range(1, heads + 1) if heads % d == 0]
        tensor = f" / parallel.tensor ({parallel.tensor})" if parallel.tensor > 1 else ""
        problems.append(
            f"model.num_heads ({model.num_heads}){tensor} must be divisible by parallel.context ({context}), as "
            f"attention.name {model.attention.name} with context_method {parallel.context_method} exchanges heads; "
            f"context degrees that fit: {', '.join(map(str, fits))}."
        )
    return problems


def _expert_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    moe, expert, tensor = model.moe, parallel.expert, parallel.tensor
    if moe is None:
        reason = f"parallel.expert ({expert}) splits the experts of model.moe, which this model has none of"
        return [f"{reason}; use data or fsdp."] if expert > 1 else []
    problems = []
    if moe.num_experts % expert:
        fits = [d for d in range(1, moe.num_experts + 1) if moe.num_experts % d == 0]
        problems.append(
            f"model.moe.num_experts ({moe.num_experts}) must be divisible by parallel.expert ({expert}); expert "
            f"degrees that fit: {', '.join(map(str, fits))}."
        )
    if model.expert_size % tensor:
        problems.append(
            f"model.moe.moe_intermediate_size ({model.expert_size}) must be divisible by parallel.tensor ({tensor}); "
            f"nearest: {_near_multiples(model.expert_size, tensor)}."
        )
    if moe.capacity_factor is not None and parallel.context > 1:
        problems.append(
            f"model.moe.capacity_factor ({moe.capacity_factor}) counts the tokens of whole sequences, which "
            f"parallel.context ({parallel.context}) splits; leave one of them out."
        )
    return problems


def _pipeline_problems(config: RunConfig) -> list[str]:
    """The rules of `layout_problems` that concern the stages."""
    model = config.model
    try:
        plan = config.pipeline_plan()
        assert plan is not None
        if config.adapters.rules:
            raise ConfigError("adapters do not go through a pipeline; use fsdp or tensor, or drop the adapters.")
        lead, period = model.layer_pattern
        StageLayout((model.num_layers - lead) // period, plan.stages, plan.chunks)
    except ConfigError as error:
        return [str(error)]
    return []


def resolve_layout(config: RunConfig, devices: int) -> RunConfig:
    """The configuration with its parallel degrees filled in for `devices` devices.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit; the message names the nearest that do.
    """
    try:
        resolved = config.model_copy(update={"parallel": config.parallel.resolve(devices)})
    except ConfigError as error:
        raise ConfigError(" ".join([str(error), *_fitting_layout(config, devices)])) from None
    problems = layout_problems(resolved)
    if problems:
        raise ConfigError(" ".join([*problems, *_fitting_layout(resolved)]))
    return resolved


def _fitting_layout(config: RunConfig, devices: int | None = None) -> list[str]:
    """The nearest layout that fits model and batch as they are, as a sentence; none where there is none."""
    parallel = config.parallel
    devices = devices or math.prod(parallel.degrees.values())

    def fits(degrees: dict[str, int]) -> bool:
        try:
            other = ParallelConfig.model_validate(parallel.model_dump() | degrees)
        except ValueError:
            return False
        return not layout_problems(config.model_copy(update={"parallel": other}))

    found = nearest_degrees(parallel.degrees, devices, fits)
    return [f"On {devices} devices this model and batch fit with parallel {found}."] if found else []


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file, lays `section.key=value` overrides over it, and validates the whole.

    Without `run.name` the run is called after the file.

    Raises:
      ConfigError: the file or a value is wrong; one message lists every problem.
    """
    tree = load_yaml(path) if path is not None else {}
    named = {"run": {"name": re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem)}} if path is not None else {}
    tree = merge_trees(named, merge_overrides(tree, overrides))
    return config_from_tree(tree, origin=str(path) if path is not None else "the configuration")


def config_from_tree(tree: dict[str, Any], origin: str = "the configuration") -> RunConfig:
    """A validated `RunConfig` from plain data, with starting point, preset and default component names filled in."""
    tree = {key: value for key, value in tree.items() if value is not None}
    run = tree.get("run")
    if isinstance(run, dict) and isinstance(run.get("init_from"), str):
        tree = fill_in(tree, run["init_from"])
    model = tree.get("model")
    if isinstance(model, dict) and model.get("preset") is not None:
        tree["model"] = merge_trees(load_preset(model["preset"]), model)
    if _leaves_ends_plain(tree) and isinstance(tree.setdefault("model", {}), dict):
        tree["model"] = {"unscanned_end_layers": 1, **tree["model"]}
    for section, default in (("optimizer", "adamw"), ("schedule", "cosine")):
        if isinstance(tree.get(section), dict):
            tree[section] = {"name": default, **tree[section]}
    return build_component(RunConfig, tree, origin)


def _leaves_ends_plain(tree: dict[str, Any]) -> bool:
    """Whether the first and the last layer stay out of FP8, and so out of the scan; a pipeline has no single layers."""

    def value(section: str, key: str, default: Any) -> Any:
        found = tree.get(section)
        return found.get(key, default) if isinstance(found, dict) else default

    return value("precision", "fp8", "none") != "none" and value("parallel", "pipeline", 1) == 1


def config_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors. `name` may be left out of optimizer and schedule."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for union in (AnyOptimizer, AnySchedule):
        for member in get_args(get_args(union)[0]):
            required = schema["$defs"][member.__name__].get("required", [])
            if "name" in required:
                required.remove("name")
    return schema


def _near_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
