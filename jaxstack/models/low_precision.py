"""Which matmuls of a Transformer run in FP8."""

from typing import Any

from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.layer_paths import choose_for_all, weight_paths
from jaxstack.models.stack import Stack
from jaxstack.models.transformer import Transformer
from jaxstack.precision.config import PrecisionConfig
from jaxstack.precision.recipe import Fp8Matmul, use_fp8
from jaxstack.tree_rules import check_patterns

_PRODUCTS = 3
"""Matmuls of a layer in a step: forward, gradient of the input, gradient of the weight."""


def in_fp8(model: Transformer, precision: PrecisionConfig) -> Transformer:
    """The model with its dense layers' matmuls as `precision` says; changed in place.

    The first and the last layer stay as they are unless a rule says otherwise, in a model of three layers or more where
    no scan runs them together with others (`ModelConfig.unscanned_end_layers`; a pipeline's stages always do).

    Raises:
      ConfigError: a rule tells apart layers that one scan runs, or matches no weight.
    """
    model.precision = precision
    if precision.fp8 == "none":
        return model
    matmul, seen = Fp8Matmul(precision.fp8, precision.fp8_gradients), {}
    rules = precision.path_rules(_ends(model.decoder))

    def choose(path: tuple[Any, ...]) -> Fp8Matmul | None:
        names = weight_paths(model, path)
        seen.update(dict.fromkeys(names, 0))
        return matmul if choose_for_all(names, rules, "precision.fp8_rules", "run in FP8") else None

    use_fp8(model, choose, history=precision.fp8_history)
    check_patterns([rule.path for rule in precision.fp8_rules], seen, "precision.fp8_rules")
    return model


def describe_fp8(config: ModelConfig, precision: PrecisionConfig, *, staged: bool) -> str:
    """Which layers run in FP8, in words ("" without it); `staged`: in a pipeline."""
    if precision.fp8 == "none":
        return ""
    if precision.fp8_rules:
        layers = "the layers that precision.fp8_rules name"
    elif config.num_layers > 2 and (config.end_layers or not (config.scan_layers or staged)):
        layers = "all layers but the first and the last"
    elif config.num_layers > 2 and staged:
        layers = "all layers (model.unscanned_end_layers=1 leaves out the first and the last, as without a pipeline)"
    else:
        layers = "all layers"
    return f"FP8 ({precision.fp8}) in {layers}"


def count_fp8_matmuls(model: nnx.Module) -> int:
    """How many FP8 matmuls a forward and backward pass needs at least."""
    count = 0
    for _, node in nnx.iter_modules(model):
        layer: Any = node
        if isinstance(getattr(layer, "dot_general", None), Fp8Matmul):
            stacked = layer.kernel.get_metadata().get("logical_axes", ())[:1] == ("layers",)
            count += layer.kernel.shape[0] if stacked else 1
    return _PRODUCTS * count


def _ends(stack: Stack) -> list[int]:
    """The first and the last of at least three layers, where they are layers of the module of their own."""
    numbers = [stack.layer_numbers(index) for index in range(len(stack.layers))]
    alone = {found[0] for found in numbers if len(found) == 1}
    count = sum(map(len, numbers))
    return sorted(alone & {0, count - 1}) if count > 2 else []
