"""Configuration of Gemma 4's attention; `jaxstack.models.mixers.gemma_attention` computes it."""

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from jaxstack.models.attention.base import AttentionSpec, ScoreOptions
from jaxstack.models.attention.softmax import SoftmaxAttention


class GemmaAttention(SoftmaxAttention):
    """Softmax attention with normalized values, and other heads in layers without a window (Gemma 4, 2026).

    A head of values is divided by its root mean square, without a gain. The keys below are those of the layers without
    a window; the other layers have the heads that the model's keys say. Needs `model.qk_norm: true`.
    """

    name: Literal["gemma4"] = "gemma4"  # pyright: ignore[reportIncompatibleVariableOverride]
    global_head_dim: int | None = Field(default=None, ge=2, le=2**16)
    """Width of a head in layers without a window; left out: head_dim."""
    num_global_kv_heads: int | None = Field(default=None, ge=1, le=2**16)
    """Number of key/value heads in layers without a window; left out: num_kv_heads."""
    attention_k_eq_v: bool = False
    """True: the values of layers without a window are the keys before norm and rotation, and are not projected."""

    shares_keys: ClassVar[bool] = True

    def layer_heads(self, heads: AttentionSpec) -> AttentionSpec:
        if heads.window is not None:
            return heads
        return dataclasses.replace(
            heads,
            head_dim=self.global_head_dim or heads.head_dim,
            num_kv_heads=self.num_global_kv_heads or heads.num_kv_heads,
        )

    def check(self, options: ScoreOptions) -> None:
        """Check that heads are normalized and of sizes that fit.

        Raises:
          ValueError: a setting is not supported.
        """
        wide = self.global_head_dim not in (None, options.head_dim)
        if options.qk_norm is not True:
            raise ValueError(f"attention.name gemma4 needs qk_norm: true; found {options.qk_norm}.")
        if wide and "sliding_attention" in options.layer_types and options.rope_local_base_freq is None:
            raise ValueError(
                "attention.global_head_dim next to layers of type sliding_attention needs rope_local_base_freq, as "
                "heads of two widths have separate rotations; set it to rope_theta for the same base."
            )
        if wide and (self.global_head_dim or 0) % 2:
            raise ValueError(f"attention.global_head_dim ({self.global_head_dim}) must be even for rotary positions.")
        if options.num_heads % (self.num_global_kv_heads or 1):
            raise ValueError(
                f"num_heads ({options.num_heads}) must be divisible by attention.num_global_kv_heads "
                f"({self.num_global_kv_heads})."
            )
        if self.sinks:
            raise ValueError("attention.sinks is not supported with attention.name gemma4; leave it out.")
        super().check(options)
