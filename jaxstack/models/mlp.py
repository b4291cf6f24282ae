"""Feed-forward sublayers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import Input, Linear, apply_mlp
from pallas_kernels import swiglu
from pallas_kernels.target import current_target


def exact_gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution function (Hendrycks & Gimpel 2016), by erf: jax.nn's erfc costs twice as much."""
    return 0.5 * x * (1 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": exact_gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


def _recomputed(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """On a GPU, whose memory is slower than its arithmetic, the gradient keeps what goes in, not its parts as well."""
    return activation if current_target().platform == "cpu" else jax.checkpoint(activation)


class PlainMLP(nnx.Module):
    """down(act(up(x))), as in GPT-2."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f, bias = config.hidden_size, config.feed_forward_size, config.mlp_bias
        inner, outer = make_initializer(config), make_initializer(config, residual=True)
        self.up_proj = Linear((d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=inner, bias=bias)
        self.down_proj = Linear((f,), (d,), ("mlp", "embed"), rngs=rngs, initialize=outer, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.name = config.hidden_act if config.hidden_act == "gelu_tanh" else None
        """What `activated_matmul` calls the activation, if it knows it."""

    def __call__(self, x: Input) -> jax.Array:
        return apply_mlp(x, (self.up_proj,), _recomputed(self.activation), self.down_proj, self.name)


class GatedMLP(PlainMLP):
    """down(act(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, f = config.hidden_size, config.feed_forward_size
        self.gate_proj = Linear(
            (d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=make_initializer(config), bias=config.mlp_bias
        )
        self.name = "swiglu" if config.hidden_act == "silu" else None

    def __call__(self, x: Input) -> jax.Array:
        return apply_mlp(x, (self.gate_proj, self.up_proj), self._join, self.down_proj, self.name)

    @property
    def _join(self) -> Callable[..., jax.Array]:
        # Its gradient keeps the two inputs only; what XLA would keep of the plain product is one array more.
        return swiglu if self.activation is jax.nn.silu else lambda gate, up: self.activation(gate) * up


MLPS = {"gated": GatedMLP, "plain": PlainMLP}
