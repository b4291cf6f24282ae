"""Initializers of weights, as in the papers of the model families."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxstack.models.config import ModelConfig

Initializer = Callable[[jax.Array, tuple[int, ...], int], jax.Array]
"""(key, shape, fan_in) -> float32 array."""


def make_initializer(config: ModelConfig, *, residual: bool = False) -> Initializer:
    """Return the configured initializer of weight matrices: normal, with a fixed std or a std from fan-in and depth.

    The depth scaling is GPT-2's (Radford et al. 2019, section 2.3); `fan_in` is LeCun et al. 1998.

    Args:
      residual: True for a matrix whose output is added to the residual stream.
    """
    depth = (2 * config.num_layers) ** -0.5 if residual and config.initialization != "normal" else 1.0

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        std = fan_in**-0.5 if config.initialization == "fan_in" else config.initializer_range
        return jax.random.normal(key, shape, jnp.float32) * (std * depth)

    return initialize


def embedding_initializer(config: ModelConfig) -> Initializer:
    """Create the initializer of embedding tables: std `initializer_range`, so that tied heads give small logits."""

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * config.initializer_range

    return initialize
