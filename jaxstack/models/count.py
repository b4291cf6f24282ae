"""Parameter counts and model FLOPs, computed from the model configuration alone.

FLOPs per token follow the convention that is printed with every run: 6 x matmul parameters (without the input
embedding, with the output head) plus those of the attention kind, for full causal attention half of 12 x layers x
sequence x (heads x head_dim).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxstack.models.config import ModelConfig
from jaxstack.models.norm import count_norm_parameters, head_norm_name


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of a model: total, embeddings, those in matmuls, and those active per token.

    Attributes:
      total: all parameters.
      embedding: token and position tables.
      matmul: matrices that multiply a token's activations: the head, tied or not, and the experts of one token.
      active: parameters that take part in the computation of one token; less than `total` with experts.
    """

    total: int
    embedding: int
    matmul: int
    active: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of the Transformer that a configuration describes.

    Raises:
      ValueError: `config.vocab_size` is None.
    """
    if config.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size must be set to count parameters.")
    d = config.hidden_size
    h = config.width_per_head
    layers = config.num_layers
    n = config.num_heads
    k = config.kv_heads
    norm = count_norm_parameters(config.norm, d)
    head_norms = 2 * count_norm_parameters(head_norm_name(config.norm), h) if config.qk_norm else 0
    attention = d * n * h + 2 * d * k * h + n * h * d
    vectors = norm * (4 if config.post_norms else 2)
    vectors += (n + 2 * k) * h * config.qkv_bias + d * config.output_bias + head_norms
    embedding = head = config.vocab_size * d
    rows = (config.max_position_embeddings or 0) if config.positions == "learned" else 0
    vectors += config.attention.count_weight()
    outside = embedding + rows * d + norm + (0 if config.tie_word_embeddings else head)
    mixtures = sum(map(config.is_mixture_layer, range(layers)))
    dense = _dense_mlp(config)
    routed = _mixture(config)
    stored = (layers - mixtures) * sum(dense) + mixtures * (routed[0] + routed[2])
    used = (layers - mixtures) * sum(dense) + mixtures * (routed[1] + routed[2])
    common = layers * (attention + vectors) + outside
    matmul = layers * attention + (layers - mixtures) * dense[0] + mixtures * routed[1] + head
    return ParameterCount(common + stored, embedding + rows * d, matmul, common + used)


def _dense_mlp(config: ModelConfig) -> tuple[int, int]:
    """Count the parameters of a dense feed-forward sublayer: (matrices, biases)."""
    d = config.hidden_size
    f = config.feed_forward_size
    inner = 2 if config.mlp == "gated" else 1
    return d * f * (inner + 1), (f * inner + d) * config.mlp_bias


def _mixture(config: ModelConfig) -> tuple[int, int, int]:
    """Count the parameters of a mixture of experts: (in matrices, in the matrices that a token uses, in vectors)."""
    moe = config.moe
    if moe is None:
        return 0, 0, 0
    expert = config.hidden_size * config.expert_size * (3 if config.mlp == "gated" else 2)
    always = config.hidden_size * moe.num_experts + moe.n_shared_experts * expert
    stored, used = (always + experts * expert for experts in (moe.num_experts, moe.num_experts_per_tok))
    return stored, used, moe.num_experts * moe.balance_bias


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return forward and backward FLOPs per token in training, without those of rematerialization.

    Softmax attention counts the keys that a query sees on average: T / 2, with a window w it is w - w^2 / 2T, in a
    block-sparse layout the keys of its blocks. Linear attention and Performer count their recurrence at any length.
    """
    layers = (config.heads(window) for window in config.windows())
    attention = sum(config.attention.flops_per_token(heads, sequence_length) for heads in layers)
    return 6.0 * count_parameters(config).matmul + attention


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
