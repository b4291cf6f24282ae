"""Configuration of compression: recipes for after training, rules for during it, and how they choose weights."""

import functools
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from jaxstack.compress.base import AfterTraining, DuringTraining, Method, method_name
from jaxstack.compress.formats.block_float import BlockFloat
from jaxstack.compress.formats.float8 import Fp8
from jaxstack.compress.formats.fp4 import Mxfp4, Nf4
from jaxstack.compress.formats.integer_grid import QatRule, Rtn
from jaxstack.compress.formats.lookup_table import KMeans
from jaxstack.compress.formats.low_rank import LowRank
from jaxstack.compress.formats.sparse import Magnitude, MaskRule
from jaxstack.compress.matrix import MatrixLayout, Weight
from jaxstack.compress.solvers.awq import Awq
from jaxstack.compress.solvers.bct import Bct, BctGptq
from jaxstack.compress.solvers.cluster import ClusterRule
from jaxstack.compress.solvers.gptq import Gptq
from jaxstack.compress.solvers.lsq import LsqRule
from jaxstack.compress.solvers.maestro import LowRankRule
from jaxstack.compress.solvers.sparsegpt import SparseGpt
from jaxstack.compress.solvers.wanda import Wanda
from jaxstack.config.base import Component, PathRule
from jaxstack.config.features import Feature
from jaxstack.config.loader import build_component, load_yaml, merge_overrides
from jaxstack.errors import ConfigError, nearest
from jaxstack.parameter_paths import check_patterns, match, match_common_value

# fmt: off
METHODS: tuple[type[Method], ...] = (
    Rtn, QatRule, LsqRule, Gptq, Awq,        # integers with scales
    Fp8,                                     # FP8 with scales
    BlockFloat, Bct, BctGptq,                # integers with powers of two
    KMeans, ClusterRule, Mxfp4, Nf4,         # indices into a table
    LowRank, LowRankRule,                    # two factors
    Magnitude, MaskRule, Wanda, SparseGpt,   # zeros
)
# fmt: on
"""Every compression method. Recipes take those that are `AfterTraining`, `compression.rules` those that are
`DuringTraining`. A new one is added here."""


class Keep(PathRule):
    """Leaves the layers that `path` matches uncompressed; no later rule applies to them."""

    method: Literal["keep"] = "keep"


if TYPE_CHECKING:
    RecipeRule: TypeAlias = AfterTraining | Keep
    TrainingRule: TypeAlias = DuringTraining
else:

    def _rule_of(kind: type[Method], *more: type[PathRule]) -> Any:
        """Return the type of a rule: a method of this kind that is in the table, or any instance of the kind."""

        def accept(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
            return value if isinstance(value, kind) else check(value)

        union = functools.reduce(operator.or_, [*(method for method in METHODS if issubclass(method, kind)), *more])
        return Annotated[union, Field(discriminator="method"), WrapValidator(accept), SerializeAsAny()]

    RecipeRule = _rule_of(AfterTraining, Keep)
    TrainingRule = _rule_of(DuringTraining)

RECIPES = Path(__file__).with_name("recipes")
"""Directory of the recipes that come with jaxstack."""


class CalibrationConfig(Component):
    """Configuration of the calibration text, for compression methods that measure the inputs of layers."""

    sequences: int = Field(default=128, ge=1)
    """Number of sequences."""
    sequence_length: int | None = Field(default=None, ge=2)
    """Tokens per sequence. Default: as in training; for a Hugging Face checkpoint 2048, or all
    positions that its model has."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per batch."""
    data: tuple[str, ...] = ()
    """Files, directories or globs. Default: the run's own training text."""
    expert_tokens: int = Field(default=256, ge=0)
    """An expert that fewer tokens are routed to is calibrated on all tokens of the text instead, and the command names
    it: from few inputs a solver such as GPTQ would learn their noise."""


class Recipe(Component):
    """A recipe of `jaxstack compress`: which method compresses which layers, and how other weights are stored."""

    layers: tuple[RecipeRule, ...] = Field(min_length=1)
    """Rules of dense layers and experts, `{path: REGULAR EXPRESSION, method: NAME, ...}`. The first one whose path
    occurs in the path of a layer's weight, such as decoder/layers/3/mlp/down_proj/kernel or head, compresses it;
    without a matching rule it is stored in `store`."""
    calibration: CalibrationConfig = CalibrationConfig()
    """Text that methods which need it are calibrated on."""
    store: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of weights that are stored as they are: those of pruned matrices, and matrices that no rule compresses."""
    vectors: Literal["float32", "bfp8"] = "float32"
    """Storage of vectors (scales of norms, biases). bfp8: integers of 8 bits, with an exponent for each block of up to
    64; they are float32 again when they are read."""


class CompressionConfig(Component):
    """Configuration of compressed training: which weights are trained in which compressed form."""

    rules: tuple[TrainingRule, ...] = ()
    """The first rule whose path occurs in a weight's path (as decoder/layers/3/mlp/down_proj/kernel) decides. Rules of
    different methods must not match the same weight."""

    @property
    def start_problem(self) -> str | None:
        """Message that says why a run with these rules cannot start from random weights; None if it can."""
        return next((rule.needs_start for rule in self.rules if rule.needs_start), None)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a compression recipe from a YAML file, or one of the recipes of jaxstack by name.

    Args:
      name: the name or the file.
      overrides: `key=value` and `calibration.key=value`, which replace values of the recipe.

    Raises:
      ConfigError: there is none, or it has a mistake.
    """
    shipped = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    path = shipped.get(name, Path(name))
    if name not in shipped and not path.is_file():
        raise ConfigError(f"there is no recipe {name!r}, and no file; {nearest(name, list(shipped))}")
    tree = merge_overrides(load_yaml(path, holds="a recipe, with rules in the list `layers:`"), overrides)
    return build_component(Recipe, tree, str(path), overrides)


def choose_methods(
    recipe: Recipe, weights: Mapping[str, MatrixLayout], others: Mapping[str, str] | None = None
) -> dict[str, AfterTraining]:
    """Return the compression method of each weight, by path, for the weights that a rule of the recipe compresses.

    Args:
      recipe: its rules.
      weights: the weights that can be compressed.
      others: what the model's other parameters are, by path, for the message about a rule that names one of them.

    Raises:
      ConfigError: a rule matches no weight, or only weights of earlier rules, or its method cannot compress one.
    """
    for rule in recipe.layers:
        _check_compressible(rule, weights, others or {}, recipe.store)
    check_patterns([rule.path for rule in recipe.layers], dict.fromkeys(weights, 0), "layers of the recipe")
    table = [*((rule.path, rule) for rule in recipe.layers), (".*", None)]
    deciding = {id(match(path, table)) for path in weights}
    for rule in recipe.layers:
        if id(rule) not in deciding:
            raise ConfigError(
                f"layers of the recipe: the rule with path {rule.path!r} is never used, as earlier rules match all of "
                "its weights, and the first rule that matches holds; put it before them, or remove it."
            )
    chosen: dict[str, AfterTraining] = {}
    for path, layout in weights.items():
        method = match(path, table)
        if method is None or isinstance(method, Keep):
            continue
        if reason := method.unsupported_reason(*layout.size):
            raise ConfigError(
                f"{path} cannot be compressed by {method_name(method)}: {reason}. Change the rule with path "
                f"{method.path!r}, or put {{path: {path}, method: keep}} before it."
            )
        chosen[path] = method
    return chosen


def _check_compressible(
    rule: AfterTraining | Keep, weights: Collection[str], others: Mapping[str, str], store: str
) -> None:
    """Raise ConfigError if a rule of a recipe matches only parameters that recipes do not compress."""
    named = [path for path in others if re.search(rule.path, path)]
    if not named or any(re.search(rule.path, path) for path in weights):
        return
    what = others[named[0]]
    raise ConfigError(
        f"layers of the recipe: the rule with path {rule.path!r} matches {named[0]}, which is {what}. Recipes compress "
        f"dense layers, experts, embedding and head, and store other matrices in {store}. Remove the rule."
    )


def choose_rules(
    weights: Sequence[Weight], rules: Sequence[DuringTraining]
) -> dict[str, tuple[DuringTraining, Weight]]:
    """Match weights with the rules of compressed training; return path -> (rule, weight) where a rule matches.

    Raises:
      ConfigError: a rule matches no weight, two methods match one, or a method cannot compress what it matches.
    """
    chosen: dict[str, tuple[DuringTraining, Weight]] = {}
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


def _check_one_method(name: str, matching: Sequence[DuringTraining]) -> None:
    methods = list(dict.fromkeys(type(rule) for rule in matching))
    if len(methods) > 1:
        first = [next(rule for rule in matching if type(rule) is kind) for kind in methods[:2]]
        texts = [f"{rule.path!r} ({method_name(rule)})" for rule in first]
        raise ConfigError(
            f"compression.rules: {' and '.join(texts)} both match {name}, but a weight has one method; make the paths "
            "match different weights, or drop a rule."
        )


FEATURES: tuple[Feature, ...] = (
    Feature("compressed weights", "compression", lambda compression: bool(compression.rules)),
    *(feature for method in METHODS if issubclass(method, DuringTraining) for feature in method.features),
)
"""Features of compressed weights in training, see `jaxstack.config.features`; each method declares its own."""
