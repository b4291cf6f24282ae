"""Block-sparse attention: blocks of queries attend to the blocks of keys that a pattern chooses.

Dims: B batch, T length, N heads, K kv heads, H head_dim, M blocks.
"""

from abc import abstractmethod
from typing import Annotated, Literal, cast

import jax
import numpy as np
from jaxtyping import Array, Bool, Float
from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.masked_softmax import MaskedSoftmax
from jaxstack.models.attention.paged_cache import PagedKeys, empty_pages
from jaxstack.models.layer import CacheRoom, SegmentIds
from pallas_kernels import block_sparse_attention
from pallas_kernels.attention import patterns
from pallas_kernels.attention.masks import Layout, Mask


class Pattern(Component):
    """Base class of causal block-sparse patterns: which blocks of keys each block of queries attends to.

    The layout of n blocks must be the first n rows and columns of the layout of more blocks.
    """

    @abstractmethod
    def layout(self, blocks: int) -> Bool[np.ndarray, "M M"]:
        """Return the boolean layout: which blocks of queries (rows) attend to which blocks of keys (columns)."""


class StridedPattern(Pattern):
    """Query blocks attend to the nearest key blocks and every stride-th earlier one (Child et al. 2019)."""

    name: Literal["strided"] = "strided"
    local: int = Field(default=4, ge=1)
    """Number of nearest blocks that a block sees, itself included."""
    stride: int = Field(default=8, ge=1)

    def layout(self, blocks: int) -> Bool[np.ndarray, "M M"]:
        return patterns.strided(blocks, local=self.local, stride=self.stride)


class FixedPattern(Pattern):
    """Layout with the block's own stripe and the last blocks of every earlier stripe (Child et al. 2019)."""

    name: Literal["fixed"] = "fixed"
    stride: int = Field(default=8, ge=1)
    """Number of blocks in a stripe."""
    summary: int = Field(default=1, ge=1)
    """Number of blocks at the end of each stripe that all later blocks see."""

    @model_validator(mode="after")
    def _check(self) -> "FixedPattern":
        if self.summary > self.stride:
            raise ValueError(f"summary ({self.summary}) must not exceed stride ({self.stride}), the stripe's blocks.")
        return self

    def layout(self, blocks: int) -> Bool[np.ndarray, "M M"]:
        return patterns.fixed(blocks, stride=self.stride, summary=self.summary)


class BigBirdPattern(Pattern):
    """Query blocks attend to the nearest key blocks, the first ones and random ones (Zaheer et al. 2020)."""

    name: Literal["bigbird"] = "bigbird"
    window: int = Field(default=3, ge=1)
    """Number of nearest blocks that a block sees, itself included."""
    global_blocks: int = Field(default=1, ge=0)
    """Number of blocks at the start that all blocks see."""
    random_blocks: int = Field(default=2, ge=0)
    """Number of further blocks that each block sees, drawn once."""
    seed: int = Field(default=0, ge=0)

    def layout(self, blocks: int) -> Bool[np.ndarray, "M M"]:
        return patterns.bigbird(
            blocks,
            window=self.window,
            global_blocks=self.global_blocks,
            random_blocks=self.random_blocks,
            seed=self.seed,
        )


class BlockSparseAttention(MaskedSoftmax):
    """Causal softmax attention restricted to the blocks of a pattern, which covers whole rows of packed documents."""

    name: Literal["block_sparse"] = "block_sparse"
    pattern: Annotated[StridedPattern | FixedPattern | BigBirdPattern, Field(discriminator="name")] = BigBirdPattern()
    block_size: int = Field(default=128, ge=16, multiple_of=16)
    """Number of tokens in a block."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        out = block_sparse_attention(
            q,
            k,
            v,
            layout=self.pattern.layout(self._blocks(k.shape[1])),
            block_size=self.block_size,
            segment_ids=segment_ids,
            scale=heads.scale,
            implementation=heads.implementation,
        )
        return cast(jax.Array, out)

    def make_shared_cache(self, heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> PagedKeys:
        return empty_pages(heads, room, dtype)

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(layout=Layout.from_pattern(self.pattern.layout(self._blocks(length)), self.block_size))

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        blocks = self._blocks(length)
        sizes = np.minimum(self.block_size, length - self.block_size * np.arange(blocks))
        # Half of the pairs within a diagonal block are causal, as in full causal attention.
        share = np.tril(np.ones((blocks, blocks))) - 0.5 * np.eye(blocks)
        return float(sizes @ (self.pattern.layout(blocks) * share) @ sizes) / length

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)
