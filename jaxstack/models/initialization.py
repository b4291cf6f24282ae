"""Initial weights, as the families' papers have them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxstack.models.config import ModelConfig

Initializer = Callable[[jax.Array, tuple[int, ...], int], jax.Array]
"""(key, shape, fan_in) -> float32 array."""


def make_initializer(config: ModelConfig, *, residual: bool = False) -> Initializer:
    """The initializer of a matrix; `residual` for one whose output joins the residual stream.

    Sources: GPT-2 (Radford et al. 2019, section 2.3) for the depth scaling; `fan_in` is LeCun et al. 1998.
    """
    depth = (2 * config.num_layers) ** -0.5 if residual and config.initialization != "normal" else 1.0

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        std = fan_in**-0.5 if config.initialization == "fan_in" else config.initializer_range
        return jax.random.normal(key, shape, jnp.float32) * (std * depth)

    return initialize


def embedding_initializer(config: ModelConfig) -> Initializer:
    """Rows of std `initializer_range`: a tied head then starts with small logits too."""

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * config.initializer_range

    return initialize
