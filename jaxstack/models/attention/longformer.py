"""A sliding window with global tokens (Longformer)."""

from typing import Any, Literal

import jax
from pydantic import Field

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.masked import MaskedSoftmax
from pallas_kernels import longformer_attention
from pallas_kernels.attention.masks import Mask


class LongformerAttention(MaskedSoftmax):
    """Softmax attention to near keys and to the first ones of the document (Beltagy et al. 2020), causal."""

    name: Literal["longformer"] = "longformer"
    window: int = Field(default=512, ge=1)
    """Keys that a query sees, itself included."""
    global_tokens: int = Field(default=0, ge=0)
    """First tokens of each document, which every later token of it sees too."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        out: Any = longformer_attention(
            q,
            k,
            v,
            window=self.window,
            global_tokens=self.global_tokens,
            segment_ids=segment_ids,
            scale=heads.scale,
            implementation=heads.implementation,
        )
        return out

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(window=self.window, global_tokens=self.global_tokens)

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        return self.global_tokens, self.window

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        near = min(self.window, length)
        far = length - near
        reached = min(self.global_tokens, far)
        return (near * length - near * near / 2 + reached * far - reached * reached / 2) / length
