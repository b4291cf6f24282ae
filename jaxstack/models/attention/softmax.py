"""Softmax attention to all earlier keys, or to those in the window that the model gives a layer."""

from typing import ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import PrivateAttr

from jaxstack.models.attention.base import AttentionSpec, ScoreOptions, context_method
from jaxstack.models.attention.kv_cache import KeyCache, attend_newest
from jaxstack.models.attention.masked_softmax import MaskedSoftmax
from jaxstack.models.attention.paged_cache import (
    PagedKeys,
    attend_pages,
    empty_pages,
)
from jaxstack.models.layer import CacheRoom, CacheSlots, SegmentIds
from pallas_kernels import context_attention, flash_attention
from pallas_kernels.attention.masks import Mask
from pallas_kernels.batch_invariant.attention import attend_whole
from pallas_kernels.batch_invariant.mode import is_batch_invariant


class SoftmaxAttention(MaskedSoftmax):
    """Softmax attention, softmax(q k^T) v (Vaswani et al. 2017), by the first backend that supports the arguments."""

    name: Literal["softmax"] = "softmax"
    sinks: bool = False
    """Give each head a learned score without a value, which every query sees in addition to its keys (gpt-oss)."""
    weight_name: ClassVar[str] = "sinks"
    weight_per_head: ClassVar[bool] = True
    _sinks: jax.Array | None = PrivateAttr(default=None)

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param | None:
        """Create the scores of the sinks, [N] of zeros in float32; None without sinks."""
        return nnx.Param(jnp.zeros(heads.num_heads, jnp.float32), logical_axes=("heads",)) if self.sinks else None

    def with_weight(self, *weight: jax.Array) -> "SoftmaxAttention":
        kind = self.model_copy()
        kind._sinks = weight[0] if weight else None
        return kind

    def count_weight(self, heads: AttentionSpec) -> int:
        return heads.num_heads * self.sinks

    @property
    def sink_scores(self) -> Float[Array, " N"] | None:
        return self._sinks

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        if is_batch_invariant():
            assert segment_ids is None, "the kernel takes whole sequences, not packed documents"
            return attend_whole(q, k, v, **heads.score_options, implementation=heads.implementation)
        out = flash_attention(
            q,
            k,
            v,
            causal=True,
            window=heads.window,
            segment_ids=segment_ids,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            sinks=self._sinks,
            implementation=heads.implementation,
        )
        return cast(jax.Array, out)

    def attend_over(
        self,
        axis_name: str,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
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
            sinks=self._sinks,
            implementation=heads.implementation,
        )

    def context_parallel_problem(self, method: str | None) -> str | None:
        return None

    def exchanges_heads(self, method: str | None) -> bool:
        return method == "all_to_all"

    def make_shared_cache(self, heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> PagedKeys:
        return empty_pages(heads, room, dtype)

    def attend_to_pages(
        self, q: Float[Array, "1 T N H"], cache: PagedKeys, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[Float[Array, "1 T N H"], PagedKeys]:
        assert slots.pages is not None
        return attend_pages(q, cache, slots.pages, heads, self._sinks)

    def attend_to_cache(
        self, q: Float[Array, "B 1 N H"], cache: KeyCache, slots: CacheSlots, heads: AttentionSpec
    ) -> Float[Array, "B 1 N H"]:
        whole = heads.window is None and heads.chunk is None and self._sinks is None
        out = attend_newest(q, cache, slots.lengths_after, heads) if whole else None
        return super().attend_to_cache(q, cache, slots, heads) if out is None else out

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(window=heads.window)

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        return 0, heads.window or heads.chunk

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        if heads.chunk is not None:
            whole, rest = divmod(length, heads.chunk)
            return (whole * heads.chunk**2 + rest**2) / (2 * length)
        seen = min(heads.window or length, length)
        return seen - seen * seen / (2 * length)

    def check(self, options: ScoreOptions) -> None:
        """Accept all model settings: softmax attention supports windows, chunks and soft caps."""
