"""FLOPs and bytes of the operations of Transformer inference (encoding, decoding), counted as by Kim et al. 2023.

"Full Stack Optimization of Transformer Inference" (arXiv:2302.14017) counts every operation of a forward pass and, for
each of them, its inputs and outputs once, at one byte per value and without any fusion: the attention scores are
written and read. `jaxstack.plan.roofline` uses another convention: a training step with fused attention in
bfloat16. Vocabulary and embeddings are not counted.
"""

import dataclasses

from jaxstack.plan.operators import OperatorCost


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a Transformer with heads of equal width and a plain feed-forward sublayer."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    activation_width: int | None = None
    """Width of the feed-forward activations, where a published count has another one than of the matrices."""


BERT_BASE = Architecture(12, 768, 12, 3072)
BERT_LARGE = Architecture(24, 1024, 16, 4096)
BERT_LARGE_AS_PUBLISHED = Architecture(24, 1024, 16, 3584, 4096)
"""The shape whose counts agree with the paper's for BERT-large within 1 %. The model itself has 8 % more operations:
the paper's count has matrices of 3584 columns."""
GPT2 = Architecture(12, 768, 12, 3072)


def encoder_operators(model: Architecture, tokens: int) -> list[OperatorCost]:
    """Return FLOPs and bytes of an encoder's forward pass over `tokens` tokens at batch size 1, in four groups."""
    n = tokens
    d = model.width
    h = model.heads
    f = model.feed_forward
    layers = model.layers
    head = d // h
    scores = n * n * h
    wide = n * (model.activation_width or f)
    parts = [
        ("projections", "matmul", 8 * n * d * d, 4 * d * d + 8 * n * d),
        ("attention", "attention", scores * (2 * head - 1) + n * d * (2 * n - 1), 4 * n * d + 2 * scores),
        ("feed-forward", "matmul", 4 * n * d * f, 2 * d * f + 2 * n * d + 2 * wide),
        ("other", "elementwise", 4 * scores + 6 * n * d + 13 * n * f, 2 * scores + 9 * n * d + 2 * wide),
    ]
    return [OperatorCost(name, kind, float(flops), float(size), layers) for name, kind, flops, size in parts]


def decoder_operators(model: Architecture, tokens: int) -> list[OperatorCost]:
    """Return FLOPs and bytes of generating `tokens` tokens with a KV cache at batch size 1, by kind of operation.

    The feed-forward sublayer is four times as wide as the model. Softmax and norms are in "other".
    """
    n = tokens
    d = model.width
    h = model.heads
    layers = model.layers
    cached = n * (n + 1) // 2  # sum of the lengths that the steps attend to
    parts = [
        ("matrices", "matmul", 24 * d * d * n, (12 * d * d + 18 * d) * n),
        ("attention", "attention", 4 * d * cached, 2 * (d + h) * cached),
        ("other", "elementwise", 4 * h * cached + 58 * d * n, 2 * h * cached + 17 * d * n),
    ]
    return [OperatorCost(name, kind, float(flops), float(size), layers) for name, kind, flops, size in parts]
