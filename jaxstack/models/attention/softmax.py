"""Softmax attention over all keys before the query, or over those in a window that the model gives a layer."""

from typing import TYPE_CHECKING, Any, Literal

import jax

from jaxstack.models.attention.base import AttentionSpec, context_method
from jaxstack.models.attention.masked import MaskedSoftmax
from pallas_kernels import context_attention, flash_attention
from pallas_kernels.attention.masks import Mask

if TYPE_CHECKING:
    from jaxstack.models.config import ModelConfig


class SoftmaxAttention(MaskedSoftmax):
    """softmax(q k^T) v (Vaswani et al. 2017), by the first kernel of the table that can do it."""

    name: Literal["softmax"] = "softmax"

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        out: Any = flash_attention(
            q,
            k,
            v,
            causal=True,
            window=heads.window,
            segment_ids=segment_ids,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            implementation=heads.implementation,
        )
        return out

    def attend_over(
        self,
        axis_name: str,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        heads: AttentionSpec,
    ) -> jax.Array:
        return context_attention(
            q,
            k,
            v,
            axis_name=axis_name,
            method=context_method(),
            causal=True,
            window=heads.window,
            segment_ids=segment_ids,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            implementation=heads.implementation,
        )

    def context_problem(self, method: str | None) -> str | None:
        return None

    def exchanges_heads(self, method: str | None) -> bool:
        return method == "all_to_all"

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(window=heads.window)

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        return 0, heads.window

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        seen = min(heads.window or length, length)
        return seen - seen * seen / (2 * length)

    def check(self, model: "ModelConfig") -> None:
        """Windows and soft caps are what this kind knows."""
