"""Configuration of training with compressed weights: which parameters, and by which method."""

import functools
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.compressed_training.base import WeightRule
from jaxstack.compressed_training.cluster import ClusterRule
from jaxstack.compressed_training.compressible_weights import Weight
from jaxstack.compressed_training.low_rank import LowRankRule
from jaxstack.compressed_training.lsq import LsqRule
from jaxstack.compressed_training.mask import MaskRule
from jaxstack.compressed_training.qat import QatRule
from jaxstack.config.base import Component
from jaxstack.config.features import Excludes, Feature, Remark
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError
from jaxstack.models.layer_paths import match_common_value
from jaxstack.tree_rules import check_patterns

METHODS = (QatRule, LsqRule, MaskRule, ClusterRule, LowRankRule)
"""Every method that `compression.rules` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyRule: TypeAlias = WeightRule
else:
    AnyRule = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="method")]


class CompressionConfig(Component):
    """Configuration of compressed training: which weights are trained in which compressed form."""

    rules: tuple[AnyRule, ...] = ()
    """The first rule whose path occurs in a weight's path (as decoder/layers/3/mlp/down_proj/kernel) decides. Rules of
    different methods must not match the same weight."""

    def has(self, method: type[WeightRule]) -> bool:
        """Return True if any of the rules compresses by this method."""
        return any(isinstance(rule, method) for rule in self.rules)


def read_compression(run: str | Path) -> CompressionConfig:
    """Return the `compression` section (rules of training compressed weights) of a run directory's config.yaml.

    Raises:
      ConfigError: it cannot be read.
    """
    path = Path(run) / "config.yaml"
    return build_component(CompressionConfig, load_yaml(path).get("compression") or {}, str(path))


def choose_rules(weights: Sequence[Weight], rules: Sequence[WeightRule]) -> dict[str, tuple[WeightRule, Weight]]:
    """Match weights with compression rules; return path -> (rule, weight) for each weight that a rule matches.

    Raises:
      ConfigError: a rule matches no weight, two methods match one, or a method cannot compress what it matches.
    """
    chosen: dict[str, tuple[WeightRule, Weight]] = {}
    table = [*((rule.path, rule) for rule in rules), (".*", None)]
    for weight in weights:
        for name in weight.names:
            _check_one_method(name, [rule for rule in rules if re.search(rule.path, name)])
        staged = weight.layout.stages > 1
        rule = match_common_value(weight.names, table, "compression.rules", "be compressed otherwise", staged=staged)
        if rule is not None:
            rule.check(weight)
            chosen[weight.path] = rule, weight
    if rules:
        known = dict.fromkeys((name for weight in weights for name in weight.names), 0)
        check_patterns([rule.path for rule in rules], known, "compression.rules, which are for matrices")
    return chosen


def _check_one_method(name: str, matching: Sequence[WeightRule]) -> None:
    methods = list(dict.fromkeys(type(rule) for rule in matching))
    if len(methods) > 1:
        first = [next(rule for rule in matching if type(rule) is kind) for kind in methods[:2]]
        texts = [f"{rule.path!r} ({getattr(rule, 'method', type(rule).__name__)})" for rule in first]
        raise ConfigError(
            f"compression.rules: {' and '.join(texts)} both match {name}, but a weight has one method; make the paths "
            "match different weights, or drop a rule."
        )


def _feature(name: str, method: type[WeightRule], settings: str, excludes: tuple[Excludes, ...] = ()) -> Feature:
    return Feature(
        name,
        "compression",
        lambda compression: compression.has(method),
        (f"compression.rules=[{{path: mlp, {settings}}}]",),
        excludes,
        also=("compressed weights",),
    )


FEATURES = (
    Feature("compressed weights", "compression", lambda compression: bool(compression.rules)),
    _feature("quantization-aware training", QatRule, "method: qat, group_size: 8"),
    _feature("learned step sizes (LSQ)", LsqRule, "method: lsq, group_size: 8"),
    _feature("clustered weights", ClusterRule, "method: cluster"),
    _feature(
        "low-rank weights",
        LowRankRule,
        "method: low_rank, rank: 4",
        (
            Excludes(
                "muP",
                "the rank of the factors does not grow with the width",
                "model.parametrization mup has no rule for the factors of method low_rank; set it to standard.",
            ),
        ),
    ),
    Feature(
        "int8 activations",
        "compression",
        lambda compression: any(rule.replaces_matmul for rule in compression.rules),
        ("compression.rules=[{path: q_proj, method: qat, bits: 8, group_size: null, activations: int8}]",),
        excludes=(
            Excludes(
                "pipeline",
                "stages call the matmuls of stacked layers, which the rule does not replace",
                "compression.rules with activations do not support a pipeline, and parallel.pipeline is "
                "{parallel.pipeline}; set it to 1, or remove `activations`.",
            ),
        ),
        remarks=(
            Remark("mixture of experts", "for the dense layers only, as experts have grouped matmuls", slower=False),
            *(
                Remark(
                    recipe,
                    "for different layers, as a matmul has one of the two",
                    slower=False,
                    turn_on=("precision.fp8_rules=[{path: q_proj, fp8: false}]",),
                )
                for recipe in ("FP8 (current)", "FP8 (delayed)", "FP8 (blockwise)")
            ),
        ),
        also=("compressed weights",),
    ),
)
"""Features of compressed weights in training, see `jaxstack.config.features`."""
