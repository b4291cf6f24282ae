"""The attention sublayer with a gate on its output (Qiu et al., arXiv:2505.06708)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import Layer, ParameterCount
from jaxstack.models.linear import Linear, apply_gathered
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.norm import LayerInput
from jaxstack.parallel import shard


class GatedAttentionLayer(Attention):
    """The attention sublayer with a gate: out = W_o (attention(x) sigmoid(W_g x)).

    Args:
      layer: its mixer is a `GatedAttention`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs)
        heads = self.heads.num_heads, self.heads.head_dim
        axes = ("embed", "heads", "head_dim")
        initialize = make_initializer(config)
        self.gate_proj = Linear((config.hidden_size,), heads, axes, rngs=rngs, initialize=initialize)

    def _change_output(self, out: Float[Array, "B T N H"], x: LayerInput) -> Float[Array, "B T N H"]:
        (gate,) = apply_gathered(x, self.gate_proj)
        gate = shard(gate, "batch", "length", "act_heads", "act_head_dim")
        return (out.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: those of attention, and the projection to gates."""
        matmul, other = Attention.count(config, layer)
        heads = config.heads(layer)
        return ParameterCount(matmul + config.hidden_size * heads.num_heads * heads.head_dim, other)
