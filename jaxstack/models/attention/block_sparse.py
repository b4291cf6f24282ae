"""Attention of blocks of queries to chosen blocks of keys; which ones, a pattern says."""

from abc import abstractmethod
from typing import Annotated, Any, Literal

import jax
import numpy as np
from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.masked import MaskedSoftmax
from pallas_kernels import block_sparse_attention
from pallas_kernels.attention import patterns
from pallas_kernels.attention.masks import Layout, Mask


class Pattern(Component):
    """A causal layout for any number of blocks; that of fewer must be the corner of that of more."""

    @abstractmethod
    def layout(self, blocks: int) -> np.ndarray:
        """Boolean [blocks, blocks]: whether a block of queries sees a block of keys."""


class StridedPattern(Pattern):
    """The nearest blocks and every stride-th one (Child et al. 2019)."""

    name: Literal["strided"] = "strided"
    local: int = Field(default=4, ge=1)
    """Nearest blocks that a block sees, itself included."""
    stride: int = Field(default=8, ge=1)

    def layout(self, blocks: int) -> np.ndarray:
        return patterns.strided(blocks, local=self.local, stride=self.stride)


class FixedPattern(Pattern):
    """The block's own stripe, and the last blocks of every stripe before it (Child et al. 2019)."""

    name: Literal["fixed"] = "fixed"
    stride: int = Field(default=8, ge=1)
    """Blocks of a stripe."""
    summary: int = Field(default=1, ge=1)
    """Last blocks of each stripe, which all later ones see."""

    @model_validator(mode="after")
    def _check(self) -> "FixedPattern":
        if self.summary > self.stride:
            raise ValueError(f"summary ({self.summary}) must not exceed stride ({self.stride}), the stripe's blocks.")
        return self

    def layout(self, blocks: int) -> np.ndarray:
        return patterns.fixed(blocks, stride=self.stride, summary=self.summary)


class BigBirdPattern(Pattern):
    """The nearest blocks, the first ones, and random ones (Zaheer et al. 2020)."""

    name: Literal["bigbird"] = "bigbird"
    window: int = Field(default=3, ge=1)
    """Nearest blocks that a block sees, itself included."""
    global_blocks: int = Field(default=1, ge=0)
    """First blocks, which all see."""
    random_blocks: int = Field(default=2, ge=0)
    """Further blocks of each row, drawn once."""
    seed: int = Field(default=0, ge=0)

    def layout(self, blocks: int) -> np.ndarray:
        return patterns.bigbird(
            blocks,
            window=self.window,
            global_blocks=self.global_blocks,
            random_blocks=self.random_blocks,
            seed=self.seed,
        )


class BlockSparseAttention(MaskedSoftmax):
    """Softmax attention to the blocks of a pattern, causal. The pattern lies over the row, also over packed ones."""

    name: Literal["block_sparse"] = "block_sparse"
    pattern: Annotated[StridedPattern | FixedPattern | BigBirdPattern, Field(discriminator="name")] = BigBirdPattern()
    block_size: int = Field(default=128, ge=16, multiple_of=16)
    """Tokens of a block."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        out: Any = block_sparse_attention(
            q,
            k,
            v,
            layout=self.pattern.layout(self._blocks(k.shape[1])),
            block_size=self.block_size,
            segment_ids=segment_ids,
            scale=heads.scale,
            implementation=heads.implementation,
        )
        return out

    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        return Mask(layout=Layout.from_pattern(self.pattern.layout(self._blocks(length)), self.block_size))

    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        blocks = self._blocks(length)
        sizes = np.minimum(self.block_size, length - self.block_size * np.arange(blocks))
        # Of a block with itself half of the pairs count, as of the whole for full causal attention.
        share = np.tril(np.ones((blocks, blocks))) - 0.5 * np.eye(blocks)
        return float(sizes @ (self.pattern.layout(blocks) * share) @ sizes) / length

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)
