"""Parameters and model FLOPs, computed from the configuration alone.

FLOPs follow the convention that is printed with every run: 6 x matmul parameters (the input embedding not counted, the
output head counted) plus attention, which its kind counts: full causal attention at half of 12 x layers x sequence x
(heads x head_dim), a token.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxstack.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `matmul` are those that multiply a token's activations (head included, tied or not).

    Of a mixture of experts `total` counts all, `active` and `matmul` those that compute a token.
    """

    total: int
    embedding: int
    matmul: int
    active: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of `Transformer(config)`; `vocab_size` must be set."""
    if config.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size must be set to count parameters.")
    d, h, layers = config.hidden_size, config.width_per_head, config.num_layers
    n, k = config.num_heads, config.kv_heads
    norm = d * (2 if config.norm == "layer_norm" else 1)
    attention = d * n * h + 2 * d * k * h + n * h * d
    vectors = norm * (4 if config.post_norms else 2)
    vectors += (n + 2 * k) * h * config.qkv_bias + d * config.output_bias + 2 * h * config.qk_norm
    embedding = head = config.vocab_size * d
    rows = (config.max_position_embeddings or 0) if config.positions == "learned" else 0
    vectors += config.attention.count_weight()
    outside = embedding + rows * d + norm + (0 if config.tie_word_embeddings else head)
    mixtures = sum(map(config.is_mixture, range(layers)))
    dense, routed = _dense_mlp(config), _mixture(config)
    held = (layers - mixtures) * sum(dense) + mixtures * (routed[0] + routed[2])
    used = (layers - mixtures) * sum(dense) + mixtures * (routed[1] + routed[2])
    common = layers * (attention + vectors) + outside
    matmul = layers * attention + (layers - mixtures) * dense[0] + mixtures * routed[1] + head
    return ParameterCount(common + held, embedding + rows * d, matmul, common + used)


def _dense_mlp(config: ModelConfig) -> tuple[int, int]:
    """(matrices, biases) of a dense feed-forward sublayer."""
    d, f, inner = config.hidden_size, config.feed_forward_size, 2 if config.mlp == "gated" else 1
    return d * f * (inner + 1), (f * inner + d) * config.mlp_bias


def _mixture(config: ModelConfig) -> tuple[int, int, int]:
    """(matrices, those that compute a token, vectors) of a mixture of experts; zeros without one."""
    moe = config.moe
    if moe is None:
        return 0, 0, 0
    expert = config.hidden_size * config.expert_size * (3 if config.mlp == "gated" else 2)
    always = config.hidden_size * moe.num_experts + moe.n_shared_experts * expert
    held, used = (always + experts * expert for experts in (moe.num_experts, moe.num_experts_per_tok))
    return held, used, moe.num_experts * moe.balance_bias


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs a trained token costs; recomputation is not counted.

    Softmax attention counts the keys that a query sees on average: T / 2, with a window w - w^2 / 2T, in a block-sparse
    layout those of its blocks. Linear attention and Performer count their recurrence, whatever the length.
    """
    layers = (config.heads(window) for window in config.windows())
    attention = sum(config.attention.flops_per_token(heads, sequence_length) for heads in layers)
    return 6.0 * count_parameters(config).matmul + attention


def flops_saved_per_token(config: ModelConfig, frozen: Mapping[str, tuple[Sequence[str], Sequence[int]]]) -> float:
    """What a step does not compute of `model_flops_per_token`: the gradients of frozen matrices, 2 FLOPs a parameter.

    Args:
      frozen: path -> logical axes and shape of the frozen parameters.
    """
    head = "embedding/table" if config.tie_word_embeddings else "head"

    def used(path: str, axes: Sequence[str]) -> float:
        """The share of a matrix that multiplies a token."""
        if config.moe is not None and "expert" in axes:
            return config.moe.num_experts_per_tok / config.moe.num_experts
        return float(path.endswith("/kernel") or path == head)

    return 2.0 * sum(math.prod(shape) * used(path, axes) for path, (axes, shape) in frozen.items())
