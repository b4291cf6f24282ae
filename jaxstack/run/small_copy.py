"""A small copy of a run's model and batch in the run's layout, for a comparison of the layout with one device."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from flax import nnx

from jaxstack.config.base import PathRule
from jaxstack.config.loader import build_component
from jaxstack.data.config import DataConfig
from jaxstack.distill import DistillConfig
from jaxstack.errors import ConfigError
from jaxstack.local_sgd.diloco import DiLoCo
from jaxstack.models import ModelConfig, Transformer, add_adapters
from jaxstack.models.adapters import AdapterRule
from jaxstack.optim.optimizers import SGD
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import ParallelConfig
from jaxstack.precision import PrecisionConfig
from jaxstack.preference import PreferenceConfig
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.run_config import RunConfig

_WIDTH = 256
"""Largest width of the small model and of its feed-forward sublayers."""
VOCABULARY = 512
_LENGTH = 128
"""Tokens of a row, or more if the layout needs them."""
_MICROBATCHES = 2
"""Largest number of microbatches outside of a pipeline: the further ones only repeat the second."""
R = TypeVar("R", bound=PathRule)


def small_copy(config: RunConfig) -> RunConfig:
    """Return a configuration with the same layout, features and kinds of layers, and a model of few parameters.

    Raises:
      ConfigError: there is none that the layout fits.
    """
    problems: list[str] = []
    for layers in range(1, config.model.num_layers + 1):
        model = _small_model(config, layers)
        if model is None or set(model.layers()) != set(config.model.layers()):
            continue
        for factor, length in itertools.product((1, 2, 4, 8), (_LENGTH, 4 * _LENGTH, 16 * _LENGTH)):
            small = _with_small_batch(config.model_copy(update={"model": model}), factor, length)
            problems = small.layout_problems()
            if not problems:
                return _with_matching_rules(small)
    reason = f": {problems[0]}" if problems else "."
    raise ConfigError(
        f"resilience.verify_layout found no small copy of the model for this layout; set it to false{reason}"
    )


def _small_model(config: RunConfig, layers: int) -> ModelConfig | None:
    """Return a narrow model with so many layers; None if the model's settings allow none."""
    model = config.model
    unit = config.parallel.tensor * config.parallel.context
    key_heads = _least_divisor(model.kv_heads, unit)
    changes: dict[str, Any] = {
        "preset": None,
        "num_layers": layers,
        "hidden_size": min(model.hidden_size, _WIDTH),
        "head_dim": model.width_per_head,
        "num_kv_heads": key_heads,
        "num_heads": key_heads * (model.num_heads // model.kv_heads),
        "intermediate_size": min(model.feed_forward_size, _WIDTH),
        "vocab_size": min(model.vocab_size or VOCABULARY, VOCABULARY),
        "dropout": 0.0,
    }
    if model.parametrization == "mup":
        changes["base_width"] = changes["hidden_size"]
    if model.moe is not None:
        moe = model.moe
        kept = max(2 * moe.num_experts_per_tok, moe.n_group)
        experts = _least_divisor(moe.num_experts, math.lcm(config.parallel.expert, moe.n_group), kept)
        changes["moe"] = {
            **moe.model_dump(),
            "num_experts": experts,
            "moe_intermediate_size": min(model.expert_size, _WIDTH),
        }
    try:
        return build_component(ModelConfig, {**model.model_dump(), **changes})
    except ConfigError:
        return None


def _least_divisor(count: int, unit: int, least: int = 1) -> int:
    """Return the smallest divisor of `count` from `least` on that is a multiple of `unit`; `count` if none is."""
    return next((n for n in range(max(1, least), count + 1) if count % n == 0 and n % unit == 0), count)


def _with_small_batch(config: RunConfig, factor: int, length: int) -> RunConfig:
    """Return the configuration with a batch of few rows, SGD without a schedule, and no other models than the run's."""
    parallel = config.parallel
    accumulation = config.train.gradient_accumulation
    if parallel.pipeline == 1:
        accumulation = min(accumulation, _MICROBATCHES)
    rows = parallel.data * parallel.fsdp * parallel.expert * max(accumulation, parallel.microbatches or 1) * factor
    train = {
        "steps": 1,
        "global_batch_size": rows,
        "gradient_accumulation": accumulation,
        "sequence_length": length,
        "batch_ramp": None,
        "xla_options": {},
    }
    frozen = tuple(group for group in config.optimizer.groups if group.frozen is not None)
    adapters = tuple(rule.model_copy(update={"dropout": 0.0}) for rule in config.adapters.rules)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "optimizer": SGD(clip_norm=None, groups=frozen),
            "schedule": Constant(),
            "adapters": config.adapters.model_copy(update={"rules": adapters}),
            "local_sgd": DiLoCo(),
            "data": DataConfig(),
            "distill": DistillConfig(),
            "preference": PreferenceConfig(),
            "policy": PolicyConfig(),
            "run": config.run.model_copy(update={"init_from": None}),
        }
    )


def _with_matching_rules(config: RunConfig) -> RunConfig:
    """Return the configuration of a small copy without the rules for layers, by number, that only the whole model has.

    A rule that matches no parameter counts as misspelt elsewhere.
    """
    adapters = _matching(config.adapters.rules, _parameter_paths(config.model, ()))
    paths = _parameter_paths(config.model, adapters)
    found = {
        "adapters": {"rules": adapters},
        "optimizer": {"groups": _matching(config.optimizer.groups, paths)},
        "compression": {"rules": _matching(config.compression.rules, paths)},
        "precision": {"fp8_rules": _matching(config.precision.fp8_rules, paths)},
    }
    sections = {name: getattr(config, name).model_copy(update=rules) for name, rules in found.items()}
    return config.model_copy(update=sections)


def _parameter_paths(model: ModelConfig, adapters: Sequence[AdapterRule]) -> list[str]:
    made = nnx.eval_shape(lambda: add_adapters(Transformer(model, nnx.Rngs(0)), adapters, nnx.Rngs(0)))
    return ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(made, nnx.Param))]


def _matching(rules: Sequence[R], paths: Sequence[str]) -> tuple[R, ...]:
    return tuple(rule for rule in rules if any(re.search(rule.path, path) for path in paths))


def on_one_device(config: RunConfig) -> RunConfig:
    """Return the configuration without its parallel layout."""
    return config.model_copy(update={"parallel": ParallelConfig()})


def in_float32(config: RunConfig) -> RunConfig:
    """Return the configuration with a computation in float32, by no kernel that was asked for by name.

    Rounding in fewer bits moves tokens to other experts, whose gradients then differ by more than those of a layout
    that forgets one of many devices.
    """
    model = config.model
    changes: dict[str, Any] = {"attention_implementation": None}
    if model.moe is not None:
        changes["moe"] = model.moe.model_copy(update={"implementation": None})
    precision = PrecisionConfig(compute="float32", reduce=config.precision.reduce)
    return config.model_copy(update={"model": model.model_copy(update=changes), "precision": precision})
