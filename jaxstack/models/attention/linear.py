"""Linear attention: similarities are products of features of queries and keys."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.recurrent import Recurrent
from pallas_kernels import linear_attention

if TYPE_CHECKING:
    from jaxstack.models.config import ModelConfig


class LinearAttention(Recurrent):
    """phi(q) . phi(k) instead of exp(q . k) (Katharopoulos et al. 2020)."""

    name: Literal["linear"] = "linear"
    feature_map: Literal["elu", "relu"] = "elu"
    """phi: elu(x) + 1, or relu(x)."""

    def features_of(self, heads: AttentionSpec) -> int:
        return heads.head_dim

    def operation(self, heads: AttentionSpec) -> Callable[..., Any]:
        return functools.partial(linear_attention, feature_map=self.feature_map, implementation=heads.implementation)

    def check(self, model: "ModelConfig") -> None:
        super().check(model)
        if model.query_pre_attn_scalar is not None:
            raise ValueError(
                f"query_pre_attn_scalar ({model.query_pre_attn_scalar}) scales scores, which attention.name linear "
                "does not have; leave it out."
            )
