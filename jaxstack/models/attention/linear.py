"""Linear attention: scores are inner products of feature maps of queries and keys."""

import functools
from typing import Literal

from jaxstack.models.attention.base import AttentionSpec, ScoreOptions
from jaxstack.models.attention.recurrent import LinearOperation, Recurrent
from pallas_kernels import linear_attention


class LinearAttention(Recurrent):
    """Attention with phi(q) . phi(k) instead of exp(q . k) (Katharopoulos et al. 2020)."""

    name: Literal["linear"] = "linear"
    feature_map: Literal["elu", "relu"] = "elu"
    """Feature map phi: elu(x) + 1, or relu(x)."""

    def feature_count(self, heads: AttentionSpec) -> int:
        return heads.head_dim

    def operation(self, heads: AttentionSpec) -> LinearOperation:
        return functools.partial(linear_attention, feature_map=self.feature_map, implementation=heads.implementation)

    def check(self, options: ScoreOptions) -> None:
        super().check(options)
        if options.query_pre_attn_scalar is not None:
            raise ValueError(
                f"query_pre_attn_scalar ({options.query_pre_attn_scalar}) scales scores, which attention.name linear "
                "does not have; leave it out."
            )
