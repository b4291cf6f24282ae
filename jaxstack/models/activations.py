"""Activations of the feed-forward sublayers, by the names of `ModelConfig.hidden_act`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Activation = Callable[[jax.Array], jax.Array]


def exact_gelu(x: jax.Array) -> jax.Array:
    """Compute GELU: x times the standard normal CDF of x (Hendrycks & Gimpel 2016, arXiv:1606.08415).

    Computed by erf, because the erfc of `jax.nn.gelu` costs twice as much.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Compute the gate of gpt-oss's experts (arXiv:2508.10925): gate sigmoid(1.702 gate) (up + 1) of clamped inputs.

    `gate` is at most `limit`, and `up` between -limit and limit.
    """
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -limit, limit) + 1)


ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": exact_gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
"""A new activation is a row here; it must map 0 to 0, as mixtures of experts pad their rows with zeros."""
