"""Performer: softmax attention estimated by random features."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.recurrent import Recurrent
from pallas_kernels import performer_attention, random_projection


class PerformerAttention(Recurrent):
    """FAVOR+ (Choromanski et al. 2021). All layers share the directions, which `seed` draws once for the run."""

    name: Literal["performer"] = "performer"
    features: int = Field(default=256, ge=1)
    """Random features of a head; the error falls with their square root."""
    orthogonal: bool = True
    """Directions orthogonal in groups of head_dim, which lowers the variance."""
    seed: int = Field(default=0, ge=0)

    def features_of(self, heads: AttentionSpec) -> int:
        return self.features

    def operation(self, heads: AttentionSpec) -> Callable[..., Any]:
        return functools.partial(
            performer_attention,
            projection=random_projection(self.features, heads.head_dim, seed=self.seed, orthogonal=self.orthogonal),
            scale=heads.scale,
            implementation=heads.implementation,
        )

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """With the products that the features are made of, forward and to the inputs backward."""
        projections = 4.0 * self.features * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
        return super().flops_per_token(heads, length) + projections
