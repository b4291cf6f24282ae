"""Sliding-window attention with global tokens (Longformer)."""

from typing import Literal, cast

import jax
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.masked_softmax import MaskedSoftmax
from jaxstack.models.layer import SegmentIds
from pallas_kernels import longformer_attention
from pallas_kernels.attention.masks import Mask


class LongformerAttention(MaskedSoftmax):
    """Causal softmax attention to a window and to the first tokens of the document (Beltagy et al. 2020)."""

    name: Literal["longformer"] = "longformer"
    window: int = Field(default=512, ge=1)
    """Keys that a query sees, itself included."""
    global_tokens: int = Field(default=0, ge=0)
    """Number of tokens at the start of each document that all its later tokens see too."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        out = longformer_attention(
            q,
            k,
            v,
            window=self.window,
            global_tokens=self.global_tokens,
            segment_ids=segment_ids,
            scale=heads.scale,
            implementation=heads.implementation,
        )
        return cast(jax.Array, out)

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(window=self.window, global_tokens=self.global_tokens)

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        return self.global_tokens, self.window

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        near = min(self.window, length)
        far = length - near
        reached = min(self.global_tokens, far)
        return (near * length - near * near / 2 + reached * far - reached * reached / 2) / length
