"""Performer: an estimate of softmax attention by random features."""

import functools
from typing import Literal

from pydantic import Field

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.recurrent import LinearOperation, Recurrent
from pallas_kernels import performer_attention, random_projection


class PerformerAttention(Recurrent):
    """FAVOR+ (Choromanski et al. 2021); all layers share random directions that `seed` draws once per run."""

    name: Literal["performer"] = "performer"
    features: int = Field(default=256, ge=1)
    """Number of random features per head; the error falls with its square root."""
    orthogonal: bool = True
    """Make the directions orthogonal in groups of head_dim, which lowers the variance."""
    seed: int = Field(default=0, ge=0)

    def feature_count(self, heads: AttentionSpec) -> int:
        return self.features

    def operation(self, heads: AttentionSpec) -> LinearOperation:
        return functools.partial(
            performer_attention,
            projection=random_projection(self.features, heads.head_dim, seed=self.seed, orthogonal=self.orthogonal),
            scale=heads.scale,
            implementation=heads.implementation,
        )

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Return forward and backward FLOPs per token of the recurrence and of the random features."""
        projections = 4.0 * self.features * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
        return super().flops_per_token(heads, length) + projections
