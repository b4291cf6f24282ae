"""Initial weights: their distribution as in the papers of the model families, and how muP scales it with width.

In the maximal update parametrization (muP, Yang et al. 2022, arXiv:2203.03466) let m = width / base width; at m = 1 the
model equals the standard parametrization. In the forward pass only attention scores have a factor of m. The factor of
the logits is part of the head's weights (of the final norm's gains if the head is the embedding), and that of router
scores is part of the router's matrix.

| role | parameters | initial weights |
|---|---|---|
| input | embeddings, positions, gains, biases | x 1 |
| hidden | matrices from width to width | x m^(-1/2) |
| output | head, routers | x 1/m |
| final_gain | gains and biases of the final norm, if the head is the embedding | x 1/m |

`jaxstack.optim.mup` has the learning rates of the roles.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.config import ModelConfig
from jaxstack.parameter_paths import match

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


Role = Literal["input", "hidden", "output", "final_gain"]

_ROLES: tuple[tuple[str, Role], ...] = (
    (r"(^|/)head$", "output"),
    (r"(^|/)(router|shared_gate)/kernel$", "output"),
    (r"/kernel$", "hidden"),
    (r".*", "input"),
)


@dataclasses.dataclass(frozen=True)
class Width:
    """The model's width relative to the width at which muP's learning rate was tuned.

    Attributes:
      ratio: width / base width.
      tied: True if the head is the embedding.
    """

    ratio: float
    tied: bool

    def role(self, path: str) -> Role:
        """Return the role of a parameter in muP: input, hidden, output or final_gain."""
        if self.tied and re.search(r"(^|/)final_norm/", path):
            return "final_gain"
        return match(path, _ROLES)


def mup_width(config: ModelConfig) -> Width | None:
    """Return the model's relative width in muP; None if muP is not used."""
    if config.parametrization == "standard" or config.base_width is None:
        return None
    return Width(config.hidden_size / config.base_width, config.tie_word_embeddings)


def initial_factor(config: ModelConfig, width: Width, path: str) -> float:
    """Return the factor by which muP changes a parameter's initial value."""
    # `fan_in` initialization already contains the factor 1/sqrt(width).
    root = 1.0 if config.initialization == "fan_in" else width.ratio**-0.5
    factors: dict[Role, float] = {
        "input": 1.0,
        "hidden": root,
        "output": root * width.ratio**-0.5,
        "final_gain": 1 / width.ratio,
    }
    return factors[width.role(path)]


def scale_initial_weights(model: nnx.Module, config: ModelConfig) -> None:
    """Scale freshly initialized weights as muP prescribes, in place; does nothing without muP."""
    width = mup_width(config)
    if width is None:
        return

    def scale(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        name = "/".join(map(str, path))
        factor = initial_factor(config, width, name)
        # Gemma's gain is 1 + scale.
        offset = 1.0 if config.norm == "rms_norm_unit_offset" and width.role(name) == "final_gain" else 0.0
        return variable.replace((variable[...] + offset) * factor - offset)

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.from_flat_state([(path, scale(path, variable)) for path, variable in flat]))


def step_size_bias(
    key: jax.Array, shape: tuple[int, ...], smallest: float = 0.001, largest: float = 0.1
) -> Float[Array, "*shape"]:
    """Return biases whose softplus is a step size, spread evenly in its logarithm (Gu & Dao 2023, arXiv:2312.00752)."""
    steps = jnp.exp(jax.random.uniform(key, shape, minval=math.log(smallest), maxval=math.log(largest)))
    return steps + jnp.log(-jnp.expm1(-steps))
