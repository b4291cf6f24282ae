"""Embeddings of each layer, which it adds to the residual stream (Gemma 3n, 2025, and Gemma 4 E2B and E4B, 2026).

The input e of a layer is (norm(W x_0 / sqrt(D)) + table[token] sqrt(d)) / sqrt(2), where x_0 is the token's embedding.
The layer ends with x + norm(P (act(G x) * e)). The input is computed for all layers at once.

Dims: L layers, B batch, T sequence, D model, d width of these embeddings.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.activations import ACTIVATIONS
from jaxstack.models.config import ModelConfig
from jaxstack.models.embedding import Embedding
from jaxstack.models.initialization import embedding_initializer, make_initializer
from jaxstack.models.layer import ParameterCount
from jaxstack.models.linear import Linear
from jaxstack.models.norm import count_norm_parameters, make_norm
from jaxstack.parallel import gather_parameter, shard


class PerLayerEmbedding(nnx.Module):
    """The inputs e of all layers, from a table with L d numbers for each token and from the tokens' embeddings."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        assert config.vocab_size is not None and config.hidden_size_per_layer_input is not None
        layers = config.num_layers
        width = config.hidden_size_per_layer_input
        d = config.hidden_size
        initialize = embedding_initializer(config)
        self.embedding = Embedding(config.vocab_size, layers * width, ("vocab", "embed"), initialize, rngs)
        kernel = make_initializer(config)(rngs.params(), (d, layers, width), d)
        self.projection = nnx.Param(kernel, logical_axes=("embed", "norm", "norm"))
        self.norm = make_norm(config.norm, width, config.norm_eps)

    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "L B T d"]:
        """Compute the inputs of all layers, given token ids and the tokens' embeddings x."""
        kernel = gather_parameter(self.projection, x.dtype)
        layers, width = kernel.shape[1:]
        projected = jnp.einsum("btd,dlw->lbtw", x, kernel) * x.shape[-1] ** -0.5
        rows = self.embedding(tokens, x.dtype).reshape(*tokens.shape, layers, width) * width**0.5
        inputs = (self.norm(projected) + jnp.moveaxis(rows, 2, 0)) * 2**-0.5
        return shard(inputs, None, "batch", "residual_length", "act_embed")


class PerLayerInput(nnx.Module):
    """The last sublayer of a layer, norm(P (act(G x) * e)), where e is the layer's own embedding of the token."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        assert config.hidden_size_per_layer_input is not None
        d = (config.hidden_size,)
        width = (config.hidden_size_per_layer_input,)
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        self.gate = Linear(d, width, ("embed", "norm"), rngs=rngs, initialize=inner)
        self.projection = Linear(width, d, ("norm", "embed"), rngs=rngs, initialize=outer)
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Float[Array, "B T D"], inputs: Float[Array, "B T d"]) -> Float[Array, "B T D"]:
        """Return the update of the residual stream x."""
        return self.norm(self.projection(self.activation(self.gate(x)) * inputs))


def count_per_layer_embeddings(config: ModelConfig) -> tuple[int, ParameterCount]:
    """Count the parameters of the table, and those of all other parts, the layers' included; zeros without them."""
    width = config.hidden_size_per_layer_input
    if width is None or config.vocab_size is None:
        return 0, ParameterCount(0, 0)
    d = config.hidden_size
    layers = config.num_layers
    norms = layers * count_norm_parameters(config.norm, d) + count_norm_parameters(config.norm, width)
    return config.vocab_size * layers * width, ParameterCount(3 * layers * d * width, norms)
