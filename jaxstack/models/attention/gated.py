"""Configuration of gated attention; `jaxstack.models.mixers.gated_attention` computes it."""

from typing import Literal

from jaxstack.models.attention.softmax import SoftmaxAttention


class GatedAttention(SoftmaxAttention):
    """Softmax attention whose output is multiplied by sigmoid(W x), before the output projection (Qwen3-Next, 2025).

    W projects the layer's input x to as many channels as the heads of queries have.
    """

    name: Literal["gated"] = "gated"  # pyright: ignore[reportIncompatibleVariableOverride]
