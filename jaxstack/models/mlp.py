"""Feed-forward sublayers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import Linear
from jaxstack.parallel import shard

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


class PlainMLP(nnx.Module):
    """down(act(up(x))), as in GPT-2."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f, bias = config.hidden_size, config.feed_forward_size, config.mlp_bias
        inner, outer = make_initializer(config), make_initializer(config, residual=True)
        self.up_proj = Linear((d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=inner, bias=bias)
        self.down_proj = Linear((f,), (d,), ("mlp", "embed"), rngs=rngs, initialize=outer, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = shard(self.up_proj(x), "batch", "length", "act_mlp")
        return self.down_proj(self.activation(hidden))


class GatedMLP(PlainMLP):
    """down(act(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, f = config.hidden_size, config.feed_forward_size
        self.gate_proj = Linear(
            (d,), (f,), ("embed", "mlp"), rngs=rngs, initialize=make_initializer(config), bias=config.mlp_bias
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = shard(self.gate_proj(x), "batch", "length", "act_mlp")
        up = shard(self.up_proj(x), "batch", "length", "act_mlp")
        return self.down_proj(self.activation(gate) * up)


MLPS = {"gated": GatedMLP, "plain": PlainMLP}
