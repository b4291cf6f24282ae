"""Gemma 4's attention sublayer: values are normalized, and may be the keys before their norm and rotation."""

import jax
from flax import nnx

from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.layer import Layer, ParameterCount
from jaxstack.models.linear import apply_gathered
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.norm import LayerInput, RMSNormWithoutGain


class GemmaAttentionLayer(Attention):
    """The attention sublayer of Gemma 4.

    Args:
      layer: its mixer is a `GemmaAttention`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs)
        self.v_norm = RMSNormWithoutGain(config.norm_eps)
        self.values_are_keys = _values_are_keys(layer)
        if self.values_are_keys:
            del self.v_proj

    def join_projections(self) -> bool:
        """Merge the projections into one layer as in other models, unless values have none."""
        return not self.values_are_keys and super().join_projections()

    def _project(self, x: LayerInput) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.values_are_keys:
            q, k = apply_gathered(x, self.q_proj, self.k_proj)
            v = k
        else:
            q, k, v = super()._project(x)
        return q, k, self.v_norm(v)

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer; there is no projection of values that are keys."""
        matmul, other = Attention.count(config, layer)
        heads = config.heads(layer)
        width = heads.num_kv_heads * heads.head_dim if _values_are_keys(layer) else 0
        return ParameterCount(matmul - config.hidden_size * width, other - width * config.qkv_bias)


def _values_are_keys(layer: Layer) -> bool:
    assert isinstance(layer.mixer, GemmaAttention)
    return layer.mixer.attention_k_eq_v and layer.window is None
