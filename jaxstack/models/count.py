"""Parameters and model FLOPs, computed from the configuration alone.

FLOPs follow the convention that is printed with every run: 6 x matmul parameters (the input embedding not counted, the
output head counted) plus attention, which its kind counts: full causal attention at half of 12 x layers x sequence x
(heads x head_dim), a token.
"""

import dataclasses

from jaxstack.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `matmul` are those that multiply activations (head included, tied or not)."""

    total: int
    embedding: int
    matmul: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of `Transformer(config)`; `vocab_size` must be set."""
    if config.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size must be set to count parameters.")
    d, h, f = config.hidden_size, config.width_per_head, config.feed_forward_size
    n, k, layers = config.num_heads, config.kv_heads, config.num_layers
    norm = d * (2 if config.norm == "layer_norm" else 1)
    matrices = d * n * h + 2 * d * k * h + n * h * d + d * f * (3 if config.mlp == "gated" else 2)
    vectors = norm * (4 if config.post_norms else 2)
    vectors += (n + 2 * k) * h * config.qkv_bias + d * config.output_bias + 2 * h * config.qk_norm
    vectors += ((f * 2 if config.mlp == "gated" else f) + d) * config.mlp_bias
    embedding = config.vocab_size * d
    head = config.vocab_size * d
    rows = (config.max_position_embeddings or 0) if config.positions == "learned" else 0
    vectors += config.attention.count_weight()
    total = layers * (matrices + vectors) + embedding + rows * d + norm
    total += 0 if config.tie_word_embeddings else head
    return ParameterCount(total=total, embedding=embedding + rows * d, matmul=layers * matrices + head)


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs a trained token costs; recomputation is not counted.

    Softmax attention counts the keys that a query sees on average: T / 2, with a window w - w^2 / 2T, in a block-sparse
    layout those of its blocks. Linear attention and Performer count their recurrence, whatever the length.
    """
    layers = (config.heads(window) for window in config.windows())
    attention = sum(config.attention.flops_per_token(heads, sequence_length) for heads in layers)
    return 6.0 * count_parameters(config).matmul + attention
