"""What linear attention remembers of the keys seen so far: its size does not grow with their number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EMPTY = -1e30
"""The logarithm of nothing: finite, so that differences of two of them are 0 and not nan."""


class LinearState(NamedTuple):
    """Sums over the keys seen, divided by exp(log_scale)."""

    values: jax.Array
    """[B, K, F, H] float32: features times values."""
    normalizer: jax.Array
    """[B, K, F] float32: features."""
    log_scale: jax.Array
    """[B, K] float32."""


def empty_linear_state(batch: int, num_kv_heads: int, features: int, head_dim: int) -> LinearState:
    """The state before any key. `features` is the last dim of what the feature map returns."""
    heads = (batch, num_kv_heads)
    return LinearState(
        jnp.zeros((*heads, features, head_dim), jnp.float32),
        jnp.zeros((*heads, features), jnp.float32),
        jnp.full(heads, EMPTY, jnp.float32),
    )
