"""Parameter counts and model FLOPs, computed from the model configuration alone.

FLOPs per token follow the convention that is printed with every run: 6 x matmul parameters (without the input
embedding, with the output head) plus those of the attention kind, for full causal attention half of 12 x layers x
sequence x (heads x head_dim).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxstack.models.config import ModelConfig
from jaxstack.models.experts_beside_mlp import ExpertsBesideMLP
from jaxstack.models.layer import Layer, ParameterCount
from jaxstack.models.mixers import mixer_module
from jaxstack.models.norm import count_norm_parameters
from jaxstack.models.per_layer_embedding import count_per_layer_embeddings
from jaxstack.models.recurrent import Recurrent


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model: total, embeddings, those in matmuls, and those active per token.

    Attributes:
      total: all parameters.
      embedding: tables of tokens and positions, and of each layer.
      matmul: matrices that multiply a token's activations: the head, tied or not, and the experts of one token. Layers
        for multi-token prediction, which training computes, count, and each of them multiplies by the head once more.
      active: parameters that take part in the computation of one token; less than `total` with experts.
    """

    total: int
    embedding: int
    matmul: int
    active: int


def count_parameters(config: ModelConfig) -> ModelSize:
    """Count the parameters of the Transformer that a configuration describes.

    Raises:
      ValueError: `config.vocab_size` is None.
    """
    if config.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size must be set to count parameters.")
    d = config.hidden_size
    norm = count_norm_parameters(config.norm, d)
    embedding = head = config.vocab_size * d
    rows = (config.max_position_embeddings or 0) if config.positions == "learned" else 0
    outside = embedding + rows * d + norm + (0 if config.tie_word_embeddings else head)
    sizes = {layer: _layer(config, layer) for layer in set(layers_in_training(config))}
    layers = [sizes[layer] for layer in layers_in_training(config)]
    predicted = config.num_nextn_predict_layers
    mixtures = sum(layer.feed_forward in ("experts", "both") for layer in layers_in_training(config))
    idle = [mixtures * count for count in _idle_experts(config)]
    table, per_layer = count_per_layer_embeddings(config)
    matmul = sum(layer.matmul for layer in layers) + predicted * 2 * d * d - idle[0] + per_layer.matmul
    total = outside + sum(map(sum, layers)) + predicted * (2 * d * d + 3 * norm) + table + sum(per_layer)
    return ModelSize(total, embedding + rows * d + table, matmul + (1 + predicted) * head, total - sum(idle))


def layers_in_training(config: ModelConfig) -> tuple[Layer, ...]:
    """Return the layers of a model, followed by those for multi-token prediction."""
    return (*config.layers(), *(config.prediction_layer,) * config.num_nextn_predict_layers)


def count_mixers(config: ModelConfig) -> ParameterCount:
    """Count the parameters of all layers' token mixers."""
    layers = layers_in_training(config)
    sizes = [mixer_module(layer.mixer).count(config, layer) for layer in layers if layer.mixer is not None]
    return ParameterCount(sum(size.matmul for size in sizes), sum(size.other for size in sizes))


def mixer_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return the forward and backward FLOPs per token of all layers' token mixers, without those of their matrices."""
    return sum(
        mixer_module(layer.mixer).flops_per_token(config, layer, sequence_length)
        for layer in layers_in_training(config)
        if layer.mixer is not None
    )


def _layer(config: ModelConfig, layer: Layer) -> ParameterCount:
    """Count the parameters of one layer, its norms included."""
    mixer = ParameterCount(0, 0) if layer.mixer is None else mixer_module(layer.mixer).count(config, layer)
    sublayers = (layer.mixer is not None) + (layer.feed_forward is not None)
    norms = sublayers * (layer.pre_norms + layer.post_norms) * count_norm_parameters(config.norm, config.hidden_size)
    feed_forward = _feed_forward(config, layer)
    other = norms + config.layer_scalars
    return ParameterCount(mixer.matmul + feed_forward.matmul, mixer.other + feed_forward.other + other)


def _feed_forward(config: ModelConfig, layer: Layer) -> ParameterCount:
    d = config.hidden_size
    inner = 2 if config.mlp == "gated" else 1
    if layer.feed_forward is None:
        return ParameterCount(0, 0)
    if layer.feed_forward == "both":
        parts = [_feed_forward(config, dataclasses.replace(layer, feed_forward=kind)) for kind in ("dense", "experts")]
        return ParameterCount(*map(sum, zip(*parts, ExpertsBesideMLP.count_scales(config), strict=True)))
    if layer.feed_forward == "dense":
        f = config.feed_forward_width(layer)
        return ParameterCount(d * f * (inner + 1), (f * inner + d) * config.mlp_bias)
    moe = config.moe
    assert moe is not None
    expert = _expert(config)
    matmul = d * (moe.num_experts + moe.shared_expert_gate) + (moe.num_experts + moe.n_shared_experts) * expert.matmul
    return ParameterCount(matmul, moe.num_experts * (moe.balance_bias + moe.router_bias + expert.other))


def _expert(config: ModelConfig) -> ParameterCount:
    """Count the parameters of one routed expert."""
    inner = 2 if config.mlp == "gated" else 1
    d = config.hidden_size
    f = config.expert_size
    assert config.moe is not None
    return ParameterCount(d * f * (inner + 1), (f * inner + d) * config.moe.expert_bias)


def _idle_experts(config: ModelConfig) -> ParameterCount:
    """Count the parameters of the experts of one mixture that do not compute a given token."""
    moe = config.moe
    if moe is None:
        return ParameterCount(0, 0)
    idle = moe.num_experts - moe.num_experts_per_tok
    return ParameterCount(*(idle * count for count in _expert(config)))


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return forward and backward FLOPs per token in training, without those of rematerialization.

    Softmax attention counts the keys that a query sees on average: T / 2, with a window w it is w - w^2 / 2T, in a
    block-sparse layout the keys of its blocks. Linear attention, Performer and recurrent layers count their recurrence
    at any length.
    """
    return 6.0 * count_parameters(config).matmul + mixer_flops_per_token(config, sequence_length)


def describe_flops(config: ModelConfig) -> str:
    """Return what `model_flops_per_token` counts, such as "6 x matmul parameters + causal attention"."""
    recurrent = {isinstance(mixer, Recurrent) for mixer in config.mixers()}
    mixers = {"causal attention": False in recurrent, "recurrences": True in recurrent}
    return " + ".join(["6 x matmul parameters", *(name for name, found in mixers.items() if found)])


def flops_saved_per_token(config: ModelConfig, frozen: Mapping[str, tuple[Sequence[str], Sequence[int]]]) -> float:
    """Return the FLOPs per token saved in training by not computing gradients of frozen parameters.

    The gradient of a frozen matrix is not computed, which saves 2 FLOPs per parameter and token.

    Args:
      frozen: logical axes and shape of the frozen parameters, by path.
    """
    head = "embedding/table" if config.tie_word_embeddings else "head"

    def used_share(path: str, axes: Sequence[str]) -> float:
        """Return the fraction of a parameter that one token's activations are multiplied with."""
        if config.moe is not None and "expert" in axes:
            return config.moe.num_experts_per_tok / config.moe.num_experts
        return float(path.endswith("/kernel") or path == head)

    return 2.0 * sum(math.prod(shape) * used_share(path, axes) for path, (axes, shape) in frozen.items())
