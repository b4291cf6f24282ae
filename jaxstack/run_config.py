"""The configuration of a training run, composed of one section for each component.

No module in a lower layer imports `RunConfig`: each component takes its own section.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import jax
from pydantic import model_validator

from jaxstack import distill, local_sgd, precision, preference
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.compress import config as compression_config
from jaxstack.compress.config import CompressionConfig
from jaxstack.config import sections as run_sections
from jaxstack.config.base import Component
from jaxstack.config.features import Feature, conflicts
from jaxstack.config.loader import (
    Tree,
    build_component,
    drop_keys_of_replaced,
    load_yaml,
    merge_overrides,
    merge_trees,
    overridden_keys,
)
from jaxstack.config.sections import RunSection, TrainConfig
from jaxstack.data.config import DataConfig
from jaxstack.distill import DistillConfig
from jaxstack.local_sgd import AnyWorkerMethod
from jaxstack.local_sgd.diloco import DiLoCo
from jaxstack.local_sgd.folder import FolderDiLoCo
from jaxstack.models import adapters
from jaxstack.models import features as model_features
from jaxstack.models.adapters import AdapterConfig
from jaxstack.models.config import ModelConfig, load_preset
from jaxstack.observe import config as observe_config
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.noise_scale import noise_problem
from jaxstack.optim import optimizers
from jaxstack.optim.optimizers import AdamW, AnyOptimizer, decay_note
from jaxstack.optim.schedules import AnySchedule, Cosine
from jaxstack.parallel import config as parallel_config
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.layout_rules import layout_problems, near_multiples, suggest_layout
from jaxstack.parallel.pipeline.plan import PipelinePlan, plan_pipeline
from jaxstack.precision import PrecisionConfig
from jaxstack.preference import PreferenceConfig
from jaxstack.reinforce import policy as reinforce_policy
from jaxstack.reinforce.config import RolloutConfig
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.reinforce.rewards import AnyReward
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.stored.model import fill_in_settings
from jaxstack.stored.packed_base import PackedModel, find_packed_base

FEATURES: tuple[Feature, ...] = (
    *parallel_config.FEATURES,
    *local_sgd.FEATURES,
    *run_sections.FEATURES,
    *model_features.FEATURES,
    *adapters.FEATURES,
    *compression_config.FEATURES,
    *distill.FEATURES,
    *preference.FEATURES,
    *reinforce_policy.FEATURES,
    *precision.FEATURES,
    *observe_config.FEATURES,
    *optimizers.FEATURES,
)
"""Features of a run and what they exclude, declared next to their configurations; docs/combinations.md shows them."""

PACKED_STATE = (0, 11)
"""First version of jax with which integers of 4 bits were tried as arguments of a compiled step."""


class RunConfig(Component):
    """Configuration of a run, one section per component; stored as `config.yaml` in the run directory."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: AnyOptimizer = AdamW()
    schedule: AnySchedule = Cosine()
    parallel: ParallelConfig = ParallelConfig()
    local_sgd: AnyWorkerMethod = DiLoCo()
    precision: PrecisionConfig = PrecisionConfig()
    adapters: AdapterConfig = AdapterConfig()
    compression: CompressionConfig = CompressionConfig()
    distill: DistillConfig = DistillConfig()
    preference: PreferenceConfig = PreferenceConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: tuple[AnyReward, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    resilience: ResilienceConfig = ResilienceConfig()

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        problem = self._length_problem() or self._batch_problem() or self._microbatch_problem()
        problem = problem or next(iter(self.conflicts()), None) or self._need_problem() or self._rollout_problem()
        if problem:
            raise ValueError(problem)
        if all(degree != -1 for degree in self.parallel.degrees.values()) and (problems := self.layout_problems()):
            raise ValueError(" ".join(filter(None, [*problems, self.suggest_layout()])))
        return self

    def conflicts(self) -> list[str]:
        """Return the message of each pair of features (`FEATURES`) in use that exclude each other; [] if none do."""
        return conflicts(FEATURES, {name: getattr(self, name) for name in type(self).model_fields})

    @property
    def reference(self) -> tuple[str, str] | None:
        """Key and value of the frozen model that each step computes to compare with; None: there is none."""
        if self.preference.computes_reference:
            return "preference.reference", self.preference.reference
        if self.policy.computes_reference:
            return "policy.reference", self.policy.reference
        return None

    @property
    def trains_adapters_only(self) -> bool:
        """True if the trained model without its adapters is the one that the run starts from."""
        return bool(self.adapters.rules) and not any(group.frozen is False for group in self.optimizer.groups)

    def _length_problem(self) -> str | None:
        longest = self.model.max_position_embeddings
        if longest is not None and self.train.sequence_length > longest:
            return (
                f"train.sequence_length ({self.train.sequence_length}) must not exceed model.max_position_embeddings "
                f"({longest}); lower the first or raise the second."
            )
        if self.schedule.warmup_steps > self.train.steps:
            return (
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) must not exceed train.steps "
                f"({self.train.steps}); lower the first or raise the second."
            )
        return None

    def _batch_problem(self) -> str | None:
        batch = self.train.global_batch_size
        microbatches = self.train.gradient_accumulation
        if batch % microbatches:
            return (
                f"train.global_batch_size ({batch}) must be divisible by train.gradient_accumulation ({microbatches}); "
                f"nearest batch: {near_multiples(batch, microbatches)}."
            )
        doublings = len(self.train.batch_ramp.double_at_tokens) if self.train.batch_ramp else 0
        if batch % 2**doublings:
            return (
                f"train.global_batch_size ({batch}) must be divisible by {2**doublings} for the {doublings} doublings "
                f"of train.batch_ramp.double_at_tokens; nearest batch: {near_multiples(batch, 2**doublings)}."
            )
        return None

    def _microbatch_problem(self) -> str | None:
        """Return why the gradient noise scale cannot be measured with these microbatches, or None."""
        microbatches = self.train.gradient_accumulation
        if not self.observe.noise_scale:
            return None
        problem = noise_problem(microbatches, self.parallel.degrees)
        smaller = 2 ** len(self.train.batch_ramp.double_at_tokens) if self.train.batch_ramp else 1
        if problem or microbatches > smaller:
            return problem
        return (
            "observe.noise_scale compares microbatches with the whole batch, but the smallest batch of "
            f"train.batch_ramp is a single one with train.gradient_accumulation={microbatches}; "
            f"set it to {2 * smaller}, or observe.noise_scale=false."
        )

    def _need_problem(self) -> str | None:
        """Return which setting another one needs, or None."""
        if self.compression.start_problem and self.run.init_from is None and self.run.branch_from is None:
            return self.compression.start_problem
        count = self.parallel.workers
        if count == 1 and not isinstance(self.local_sgd, FolderDiLoCo):
            given = self.local_sgd != DiLoCo()
            return "local_sgd needs parallel.workers of 2 or more; set it, or remove the section." if given else None
        return self.local_sgd.problem(count)

    def _rollout_problem(self) -> str | None:
        """Return why rollouts do not fit the rest of the configuration, or None."""
        policy = self.policy
        rollout = self.rollout
        if policy.loss is None:
            return None
        batch = self.train.global_batch_size
        answers = rollout.prompts * policy.samples
        if batch != answers:
            return (
                f"a step trains on all answers of a rollout: train.global_batch_size ({batch}) must be rollout.prompts "
                f"({rollout.prompts}) x policy.samples ({policy.samples}) = {answers}; set it to that, or leave it out."
            )
        if policy.router_replay and self.model.moe is None:
            return "policy.router_replay is for mixtures of experts, and model.moe is not set; set it to false."
        if rollout.resample and rollout.carried_prompts:
            return (
                f"rollout.resample ({rollout.resample}) needs complete rollouts, and rollout.carried_prompts "
                f"({rollout.carried_prompts}) leaves answers to the next one; set one of them to 0."
            )
        if rollout.environment.path and rollout.carried_prompts:
            return (
                f"rollout.carried_prompts ({rollout.carried_prompts}) leaves answers of one turn to the next rollout, "
                "and with rollout.environment.path they have several; remove one of them."
            )
        if rollout.packing and self.train.gradient_accumulation == 1:
            return (
                "rollout.packing leaves out microbatches without answers: set train.gradient_accumulation (1) to 2 or "
                "more, or rollout.packing to false."
            )
        if rollout.resample and not policy.drops_groups:
            return (
                f"rollout.resample ({rollout.resample}) replaces groups of equal rewards, which count here: advantages "
                f"are {policy.baseline}, policy.drop_equal_groups is {str(policy.drop_equal_groups).lower()}; set it "
                "to 0, or compare within groups and drop those that are equal."
            )
        for name, value in (
            ("train.steps", self.train.steps),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
            ("checkpoint.memory_every_steps", self.checkpoint.memory_every_steps),
        ):
            if value % policy.updates:
                return (
                    f"{name} ({value}) must be divisible by policy.updates ({policy.updates}), so that no rollout is "
                    f"cut; nearest: {near_multiples(value, policy.updates)}."
                )
        if rollout.temperature != 1 and self.model.final_logit_softcapping is not None:
            return (
                f"rollout.temperature ({rollout.temperature}) must be 1 with model.final_logit_softcapping "
                f"({self.model.final_logit_softcapping})."
            )
        return None

    def layout_problems(self) -> list[str]:
        """Return why this layout, whose degrees must all be given, is not possible; [] if it is."""
        return [*self.conflicts(), *layout_problems(self.model, self.parallel, self.train)]

    def suggest_layout(self, devices: int | None = None) -> str | None:
        """Return a sentence that suggests the nearest possible layout on `devices` devices; None if there is none.

        Args:
          devices: default: the product of the degrees.
        """

        def problems(parallel: ParallelConfig) -> list[str]:
            return self.model_copy(update={"parallel": parallel}).layout_problems()

        return suggest_layout(self.parallel, problems, devices)

    @property
    def one_worker(self) -> "RunConfig":
        """Configuration of one worker; `self` without workers."""
        count = self.parallel.workers
        simulated = self.parallel.simulate_devices
        if count == 1:
            return self
        degrees = {"workers": 1, "simulate_devices": simulated and simulated // count}
        sizes = {"global_batch_size": self.train.global_batch_size // count}
        parts = {"parallel": self.parallel.model_copy(update=degrees), "train": self.train.model_copy(update=sizes)}
        return self.model_copy(update={**parts, "local_sgd": DiLoCo()})

    @property
    def directory(self) -> Path:
        """Directory of the run: `run.dir` / `run.name`."""
        return Path(self.run.dir) / self.run.name

    def packed_base(self, say: Callable[[str], None] = lambda line: None) -> PackedModel | None:
        """Return the compressed model whose weights the run keeps packed beside its adapters; None if there is none.

        That is the base of a run that goes on, or else the compressed model of `run.init_from`. The layout must be
        resolved.

        Args:
          say: called with the reason why a packed model is read as plain numbers.

        Raises:
          ConfigError: the run goes on from one that keeps its base packed, which its settings do not allow.
        """
        if not self.adapters.rules:
            return None
        run = self.run
        return find_packed_base(self.directory, run.branch_from, run.init_from, self._unpacked_reason(), say)

    def _unpacked_reason(self) -> str | None:
        """Return why a run with adapters cannot keep a compressed model packed; None if it can."""
        if self.parallel.workers > 1 or isinstance(self.local_sgd, FolderDiLoCo):
            return "workers exchange plain weights"
        kept_whole = {"data"} if self.model.moe is not None else {"data", "fsdp"}
        split = [axis for axis, degree in self.parallel.degrees.items() if degree > 1 and axis not in kept_whole]
        if split:
            return f"parallel.{split[0]} splits them"
        if jax.__version_info__ < PACKED_STATE:
            return f"jax {jax.__version__} passes no integers of 4 bits to a compiled step; a newer one does"
        if self.model.scan_layers:
            return "model.scan_layers stacks them; set it to false"
        if any(rule.fp8 for rule in self.precision.fp8_rules):
            return "precision.fp8 quantizes them anew"
        if self.policy.loss is not None:
            return "jaxstack.reinforce samples with plain weights"
        return None

    def pipeline_plan(self) -> PipelinePlan | None:
        """Return schedule, stages and microbatches of pipeline parallelism; None if it is not used.

        Raises:
          ConfigError: the microbatches do not divide the batch or do not suit the schedule.
        """
        if self.parallel.pipeline == 1:
            return None
        return plan_pipeline(self.parallel, self.train.global_batch_size, self.train.gradient_accumulation)


def print_note(text: str) -> None:
    """Print a note on standard error, so that it does not mix with a command's results."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, report: Callable[[str], None] = print_note
) -> RunConfig:
    """Read a run's configuration from a YAML file, apply `section.key=value` overrides, and validate it.

    Args:
      path: YAML file; None starts from the defaults. Without `run.name`, the run is named after the file.
      overrides: values that replace the file's; each is parsed as YAML. One that names another optimizer, schedule or
        attention drops the file's keys of the former, and a run made shorter than its warm-up gets a shorter warm-up.
      report: gets a sentence for each value of the file that an override changes in this way.

    Raises:
      ConfigError: the file or a value is wrong; one message lists every problem.
    """
    tree = load_tree(path, overrides, report=report)
    return config_from_tree(tree, str(path) if path is not None else "the configuration", overrides)


def load_tree(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, report: Callable[[str], None] = print_note
) -> Tree:
    """Read a YAML configuration file and apply overrides; return plain data, not validated and without defaults.

    Raises:
      ConfigError: the file cannot be read, or an override has no `section.key=value` form.
    """
    tree = _expand_auto(load_yaml(path)) if path is not None else {}
    overrides = ["parallel.auto=true" if o.replace(" ", "") == "parallel=auto" else o for o in overrides]
    named = {"run": {"name": re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem)}} if path is not None else {}
    tree, notes = drop_keys_of_replaced(RunConfig, tree, overrides)
    tree = merge_trees(named, merge_overrides(tree, overrides))
    for note in [*notes, *_shorten_warmup(tree, overrides), *_decay_notes(tree)]:
        report(note)
    return tree


def _shorten_warmup(tree: Tree, overrides: Sequence[str]) -> list[str]:
    """Shorten the warm-up to a tenth of the run if an override of `train.steps` requires it; return notes on it."""
    given = overridden_keys(overrides)
    train = tree.get("train")
    schedule = tree.get("schedule")
    if "train.steps" not in given or "schedule.warmup_steps" in given or not isinstance(schedule, dict):
        return []
    steps = train.get("steps") if isinstance(train, dict) else None
    warmup = schedule.get("warmup_steps")
    if not isinstance(steps, int) or not isinstance(warmup, int) or warmup <= steps or steps < 1:
        return []
    schedule["warmup_steps"] = shorter = max(1, steps // 10)
    return [f"schedule.warmup_steps is {shorter} instead of {warmup}, because train.steps={steps}"]


def _decay_notes(tree: Tree) -> list[str]:
    """Return the note of `decay_note` on a configuration's optimizer and schedule, as a list of at most one."""
    names = [keys.get("name") if isinstance(keys := tree.get(key), dict) else None for key in ("optimizer", "schedule")]
    return [note] if (note := decay_note(*names)) else []


def config_from_tree(
    tree: Mapping[str, object], origin: str = "the configuration", overrides: Sequence[str] = ()
) -> RunConfig:
    """Build a validated run configuration from plain data, such as the content of a YAML file.

    Fills in the model and tokenizer of `run.init_from` or `run.branch_from`, the preset, and the default names of
    optimizer and schedule.

    Args:
      tree: sections as nested dicts; a section of None counts as absent.
      origin: what error messages call the data, such as its file name.
      overrides: the overrides that are in the tree already; errors about their values name them.

    Raises:
      ConfigError: a value is wrong; one message lists every problem.
    """
    sections: Tree = {key: value for key, value in _expand_auto(tree).items() if value is not None}
    run = sections.get("run")
    for key in ("init_from", "branch_from"):
        if isinstance(run, dict) and isinstance(run.get(key), str):
            sections = fill_in_settings(sections, run[key])
    model = sections.get("model")
    if isinstance(model, dict) and model.get("preset") is not None:
        sections["model"] = merge_trees(load_preset(model["preset"]), model)
    _fill_in_rollouts(sections)
    if _keeps_end_layers_wide(sections) and isinstance(sections.setdefault("model", {}), dict):
        sections["model"] = {"unscanned_end_layers": 1, **sections["model"]}
    for section, default in (("optimizer", "adamw"), ("schedule", "cosine"), ("local_sgd", "diloco")):
        if isinstance(sections.get(section), dict):
            sections[section] = {"name": default, **sections[section]}
    return build_component(RunConfig, sections, origin, overrides)


def _fill_in_rollouts(tree: Tree) -> None:
    """Set what follows from rollouts where it is missing: the batch size, and the correction for older weights."""
    policy = tree.get("policy")
    if not isinstance(policy, dict) or policy.get("loss") is None:
        return
    rollout = tree.get("rollout") or {}
    prompts = rollout.get("prompts", RolloutConfig().prompts) if isinstance(rollout, dict) else None
    samples = policy.get("samples", PolicyConfig().samples)
    train = tree.get("train") or {}
    if isinstance(train, dict) and isinstance(prompts, int) and isinstance(samples, int):
        tree["train"] = {"global_batch_size": prompts * samples, **train}
    correction = policy.get("sampler_correction") or {}
    older = isinstance(rollout, dict) and (rollout.get("stale_steps") or rollout.get("carried_prompts"))
    if older and isinstance(correction, dict):
        tree["policy"] = {**policy, "sampler_correction": {"method": "truncate", **correction}}


def _expand_auto(tree: Mapping[str, object]) -> Tree:
    """Return the configuration data with the shorthand `parallel: auto` written out as a section."""
    return {**tree, "parallel": {"auto": True}} if tree.get("parallel") == "auto" else dict(tree)


def _keeps_end_layers_wide(tree: Mapping[str, object]) -> bool:
    """Return True if the first and last layer stay out of FP8, and so out of the scan over layers.

    A pipeline has no unscanned layers: it deals all layers to its stages.
    """

    def value(section: str, key: str, default: object) -> object:
        found = tree.get(section)
        return found.get(key, default) if isinstance(found, dict) else default

    return value("precision", "fp8", "none") != "none" and value("parallel", "pipeline", 1) == 1


def config_schema() -> Tree:
    """Return the JSON schema of configuration files, for completion and checks in editors.

    The `name` of optimizer and schedule is optional in it, and `parallel` may be `auto`.
    """
    schema = RunConfig.model_json_schema(by_alias=True)
    schema["properties"]["parallel"] = {"anyOf": [schema["properties"]["parallel"], {"const": "auto"}]}
    for union in (AnyOptimizer, AnySchedule, AnyWorkerMethod):
        for member in get_args(get_args(union)[0]):
            required = schema["$defs"][member.__name__].get("required", [])
            if "name" in required:
                required.remove("name")
    return schema
