"""Sets which matmuls of a Transformer run in FP8, and the low-bit format of its KV cache."""

import dataclasses
from typing import Any

from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.attention.cache_formats import CACHE_FORMATS
from jaxstack.models.attention.masked_softmax import MaskedSoftmax
from jaxstack.models.config import ModelConfig
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.moe_layer import Experts
from jaxstack.models.stack import Stack
from jaxstack.models.transformer import Transformer
from jaxstack.parameter_paths import check_patterns, match_common_value, weight_paths
from jaxstack.precision import Fp8Matmul, PrecisionConfig, use_fp8


def in_fp8(model: Transformer, precision: PrecisionConfig) -> Transformer:
    """Set the model's dense layers to compute in FP8 where `precision` says so, in place.

    The first and the last of at least three layers are not changed unless a rule says so or a scan runs them together
    with others (see `ModelConfig.unscanned_end_layers`; the stages of a pipeline always do).

    Raises:
      ConfigError: a rule matches no weight, or only some of the layers that one scan runs.
    """
    model.precision = precision
    if precision.fp8 == "none":
        return model
    matmul = Fp8Matmul(precision.fp8, precision.fp8_gradients)
    seen = {}
    rules = precision.path_rules(_unscanned_end_layers(model.decoder))

    def choose(path: tuple[Any, ...]) -> Fp8Matmul | None:
        names = weight_paths(model, path)
        seen.update(dict.fromkeys(names, 0))
        return matmul if match_common_value(names, rules, "precision.fp8_rules", "run in FP8") else None

    use_fp8(model, choose, history=precision.fp8_history)
    for path, experts in _routed_experts(model):
        names = weight_paths(model, path)
        seen.update(dict.fromkeys(names, 0))
        experts.fp8 = match_common_value(names, rules, "precision.fp8_rules", "run in FP8")
    check_patterns([rule.path for rule in precision.fp8_rules], seen, "precision.fp8_rules")
    return model


def with_kv_cache(model: Transformer, name: str) -> Transformer:
    """Set the low-bit format in which the model stores its KV cache, in place.

    Args:
      name: `precision.kv_cache`; "none" leaves the model as it is.

    Raises:
      ConfigError: the model's attention has no such cache, or its heads do not fit the format.
    """
    if name == "none":
        return model
    config = model.config
    cache_format = CACHE_FORMATS[name]
    if not any(isinstance(mixer, MaskedSoftmax) for mixer in config.mixers()):
        raise ConfigError(
            f"precision.kv_cache {name} needs attention.name softmax, longformer or block_sparse, which keep the keys "
            f"and values of tokens; found {config.mixers()[0].described}: set precision.kv_cache=none."
        )
    problem = cache_format.unsupported_reason(config.width_per_head)
    if problem:
        raise ConfigError(
            f"precision.kv_cache {name} cannot store heads of {config.width_per_head} channels: {problem}; int8 "
            "stores heads of 16 or more channels, fp8 of any number."
        )
    for layer in model.decoder.layers:
        if isinstance(layer.attention, Attention):
            layer.attention.heads = dataclasses.replace(layer.attention.heads, cache_format=cache_format)
    return model


def describe_fp8(config: ModelConfig, precision: PrecisionConfig, *, staged: bool) -> str:
    """Describe in words which layers run in FP8; returns "" if none does.

    Args:
      staged: True if the layers are stages of a pipeline.
    """
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
    experts = ", experts with a scale for every 128 values" if config.moe and precision.fp8 != "blockwise" else ""
    return f"FP8 ({precision.fp8}) in {layers}{experts}"


def count_fp8_matmuls(model: nnx.Module) -> int:
    """Return a lower bound on the number of FP8 matmuls in a forward and backward pass.

    A dense layer has three: its output, the gradient of its kernel, and that of its input. With blockwise scales,
    layers that share an input, such as the query, key and value projections, compute its gradient in one matmul. Layers
    of one module whose inputs have the same shape count as sharing their input. The projections of the routed experts
    of a layer count as one layer each, with blockwise scales.
    """
    count = 0
    inputs = dict[tuple[Any, ...], int]()
    for path, node in nnx.iter_modules(model):
        layer: Any = node
        matmul = getattr(layer, "dot_general", None)
        experts = isinstance(layer, Experts) and layer.fp8
        if not (experts or isinstance(matmul, Fp8Matmul)):
            continue
        stacked = layer.kernel.get_metadata().get("logical_axes", ())[:1] == ("layers",)
        layers = layer.kernel.shape[0] if stacked else 1
        count += 2 * layers
        contracted = layer.kernel.shape[int(stacked) + experts :][: getattr(layer, "contracted", 1)]
        blockwise = experts or (isinstance(matmul, Fp8Matmul) and matmul.recipe == "blockwise")
        inputs[(path[:-1], contracted) if blockwise else path] = layers
    return count + sum(inputs.values())


def _routed_experts(model: nnx.Module) -> list[tuple[tuple[Any, ...], Experts]]:
    return [(path, node) for path, node in nnx.iter_modules(model) if isinstance(node, Experts)]


def _unscanned_end_layers(stack: Stack) -> list[int]:
    """Return the indices of the first and last layer, leaving out layers in a scan; [] for fewer than three layers."""
    numbers = [stack.layer_numbers(index) for index in range(len(stack.layers))]
    single = {found[0] for found in numbers if len(found) == 1}
    count = sum(map(len, numbers))
    return sorted(single & {0, count - 1}) if count > 2 else []
