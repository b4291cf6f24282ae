"""Dense feed-forward sublayers, plain and gated."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.activations import ACTIVATIONS, Activation
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import (
    Linear,
    apply_mlp,
    apply_packed_float8_mlp,
    is_packed_float8_mlp,
    join_layers,
    split_outputs,
)
from jaxstack.models.norm import LayerInput
from pallas_kernels import swiglu
from pallas_kernels.target import current_target


def _recomputed(activation: Activation) -> Activation:
    """Wrap an activation so that it is recomputed in the backward pass on GPUs, where that is cheaper than saving."""
    return activation if current_target().platform == "cpu" else jax.checkpoint(activation)


class PlainMLP(nnx.Module):
    """Feed-forward sublayer down(act(up(x))), as in GPT-2."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d = config.hidden_size
        f = config.feed_forward_size
        bias = config.mlp_bias
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        self.up_proj = Linear((d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=inner, bias=bias)
        self.down_proj = Linear((f,), (d,), ("mlp", "embed"), rngs=rngs, initialize=outer, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fused_name = config.hidden_act if config.hidden_act == "gelu_tanh" else None
        """Name of the activation in `activated_matmul`; None: that kernel does not support it."""

    def __call__(self, x: LayerInput) -> Float[Array, "B T D"]:
        """Apply the sublayer to x [B, T, D]."""
        return apply_mlp(x, (self.up_proj,), _recomputed(self.activation), self.down_proj, self.fused_name)


class GatedMLP(PlainMLP):
    """Feed-forward sublayer down(act(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d = config.hidden_size
        f = config.feed_forward_size
        self.gate_proj = Linear(
            (d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=make_initializer(config), bias=config.mlp_bias
        )
        self.fused_name = "swiglu" if config.hidden_act == "silu" else None
        self.gate_up_proj: Linear | None = nnx.data(None)
        """Both projections as one layer, after `join_projections`."""
        self.joined_parts = 1
        """Number of devices among which the outputs of the joined layer are divided."""
        self.width = f

    def __call__(self, x: LayerInput) -> Float[Array, "B T D"]:
        """Apply the sublayer to x [B, T, D]."""
        if self.gate_up_proj is None:
            return apply_mlp(x, (self.gate_proj, self.up_proj), self._multiply_gate, self.down_proj, self.fused_name)
        activation = self._multiply_gate
        if activation is swiglu and self.joined_parts == 1 and is_packed_float8_mlp(self.gate_up_proj, self.down_proj):
            return apply_packed_float8_mlp(x, self.gate_up_proj, self.down_proj)

        def combine(y: jax.Array) -> jax.Array:
            return activation(*split_outputs(y, (self.width, self.width), -1, self.joined_parts))

        return apply_mlp(x, (self.gate_up_proj,), combine, self.down_proj, None)

    def join_projections(self, parts: int = 1) -> bool:
        """Merge the gate and up projections into one dense layer; return False if not possible, or already done.

        Args:
          parts: as in `join_layers`.
        """
        if self.gate_up_proj is not None:
            return False
        self.gate_up_proj = join_layers((self.gate_proj, self.up_proj), -1, parts)
        if self.gate_up_proj is None:
            return False
        self.joined_parts = parts
        del self.gate_proj, self.up_proj
        return True

    @property
    def _multiply_gate(self) -> Callable[..., jax.Array]:
        # The gradient of `swiglu` saves its two inputs only; for the plain product XLA would save a third array.
        return swiglu if self.activation is jax.nn.silu else lambda gate, up: self.activation(gate) * up


MLPS: dict[str, type[PlainMLP]] = {"gated": GatedMLP, "plain": PlainMLP}
"""Feed-forward sublayers by the names of `ModelConfig.mlp`."""
