"""Reads compression recipes, and finds the method that a recipe gives each dense layer of a model."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from jaxstack.compress.config import Recipe
from jaxstack.compress.methods.base import Keep, Method
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.config.overrides import merge_overrides
from jaxstack.errors import ConfigError, nearest
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.linear import Linear
from jaxstack.tree_rules import check_patterns, match

RECIPES = Path(__file__).with_name("recipes")
"""Directory of the recipes that come with jaxstack."""


class WeightDims(NamedTuple):
    """Shape of a weight, split into its input dims and its output dims."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the weight as a matrix [out, in]."""
        return math.prod(self.outputs), math.prod(self.inputs)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a compression recipe from a YAML file, or by name from those that come with jaxstack.

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


def dense_weights(model: ModelConfig) -> dict[str, WeightDims]:
    """Return the weights that can be compressed, by path in the unrolled model: dense layers, head and embedding.

    The embedding is compressed as the head of a tied model multiplies with it. Experts and routers are not listed.
    """
    module = nnx.eval_shape(lambda: Transformer(model.model_copy(update={"scan_layers": False}), nnx.Rngs(0)))
    vocab, width = module.embedding.table.shape
    found = {"embedding/table": WeightDims((width,), (vocab,))}
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, Linear):
            shape = layer.kernel.shape
            dims = WeightDims(shape[: layer.contracted], shape[layer.contracted :])
            found["/".join(map(str, (*path, "kernel")))] = dims
    if module.head is not None:
        found["head"] = WeightDims((width,), (vocab,))
    return dict(sorted(found.items(), key=lambda item: forward_order_key(item[0])))


def forward_order_key(path: str) -> tuple[int | str, ...]:
    """Return a sort key for parameter paths, in forward order: embedding, layers by number, head."""
    parts = path.split("/")
    place = {"embedding": 0, "decoder": 1}.get(parts[0], 2)
    number = int(parts[2]) if parts[:2] == ["decoder", "layers"] else 0
    return place, number, path


def choose_methods(recipe: Recipe, weights: Mapping[str, WeightDims]) -> dict[str, Method]:
    """Return the compression method of each weight, by path, for the weights that a rule of the recipe compresses.

    Raises:
      ConfigError: a rule matches no weight, or only weights of earlier rules, or its method cannot compress one.
    """
    check_patterns([rule.path for rule in recipe.layers], dict.fromkeys(weights, 0), "layers of the recipe")
    table = [*((rule.path, rule) for rule in recipe.layers), (".*", None)]
    deciding = {id(match(path, table)) for path in weights}
    for rule in recipe.layers:
        if id(rule) not in deciding:
            raise ConfigError(
                f"layers of the recipe: the rule with path {rule.path!r} is never used, as earlier rules match all of "
                "its weights, and the first rule that matches holds; put it before them, or remove it."
            )
    chosen: dict[str, Method] = {}
    for path, dims in weights.items():
        method = match(path, table)
        if method is None or isinstance(method, Keep):
            continue
        if reason := method.unsupported_reason(*dims.matrix):
            raise ConfigError(
                f"{path} cannot be compressed by {method_name(method)}: {reason}. Change the rule with path "
                f"{method.path!r}, or put {{path: {path}, method: keep}} before it."
            )
        chosen[path] = method
    return chosen


def method_name(method: Method) -> str:
    """Return the name by which recipes choose a compression method, such as `gptq`."""
    return str(type(method).model_fields["method"].default)
