"""The token mixer of Kimi Delta Attention (Kimi Linear, arXiv:2510.26692): gated DeltaNet with finer decays.

Each key channel of a value head has its own decay, -exp(a_log) softplus(f_b(f_a(x)) + dt_bias), and the gate of the
output is sigmoid(g_b(g_a(x))), where f_a and g_a project to few channels. All else is that of gated DeltaNet.

Dims: B batch, T length, D model, K key heads of H channels, N value heads of V channels.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer, step_size_bias
from jaxstack.models.layer import Layer, ParameterCount
from jaxstack.models.linear import Linear, apply_together
from jaxstack.models.mixers.gated_delta import GatedDeltaNet
from jaxstack.models.norm import LayerInput
from jaxstack.models.recurrent import GatedDelta


class KimiDeltaAttention(GatedDeltaNet):
    """The sublayer of Kimi Delta Attention.

    Args:
      layer: its mixer is a `KimiDelta`.
    """

    def _make_gates(self, config: ModelConfig, kind: GatedDelta, rngs: nnx.Rngs) -> None:
        inner = make_initializer(config)

        def project(inputs: int, outputs: tuple[int, ...], axes: tuple[str, ...]) -> Linear:
            return Linear((inputs,), outputs, ("embed", *axes), rngs=rngs, initialize=inner)

        few = kind.head_dim
        decays, values = ((kind.num_heads, width) for width in (kind.key_head_dim, kind.head_dim))
        axes = ("heads", "head_dim")
        self.f_a_proj = project(config.hidden_size, (few,), axes[1:])
        self.f_b_proj = project(few, decays, axes)
        self.g_a_proj = project(config.hidden_size, (few,), axes[1:])
        self.g_b_proj = project(few, values, axes)
        self.dt_bias = nnx.Param(step_size_bias(rngs.params(), decays), logical_axes=axes)

    @staticmethod
    def _gate(z: Float[Array, "B T N V"]) -> Float[Array, "B T N V"]:
        return jax.nn.sigmoid(z)

    def _project(self, x: LayerInput) -> list[jax.Array]:
        wide = apply_together(x, self.in_proj_q, self.in_proj_k, self.in_proj_v)
        beta, few, few_of_gate = apply_together(x, self.in_proj_b, self.f_a_proj, self.g_a_proj)
        return [*wide, self.g_b_proj(few_of_gate), beta, self.f_b_proj(few)]

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: projections; convolutions, the norm, and what each head has."""
        kind = layer.mixer
        assert isinstance(kind, GatedDelta)
        n = kind.num_heads
        few = kind.head_dim
        keys = kind.num_key_heads * kind.key_head_dim
        values = n * kind.head_dim
        decays = n * kind.key_head_dim
        projected = 2 * keys + 2 * values + n + 2 * few
        other = kind.conv_kernel * (2 * keys + values) + n + decays + kind.head_dim
        return ParameterCount(config.hidden_size * projected + few * (decays + values), other)
