"""Recurrent state of linear attention: sums over the keys seen so far, whose size does not grow with their number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EMPTY = -1e30
"""Logarithm of an empty sum: finite, so that the difference of two of them is 0 and not nan."""


class LinearState(NamedTuple):
    """Recurrent state of linear attention: sums over the keys seen so far, divided by exp(log_scale)."""

    values: jax.Array
    """Sum of features times values, float32 [B, K, F, H]."""
    normalizer: jax.Array
    """Sum of features, float32 [B, K, F]."""
    log_scale: jax.Array
    """Logarithm of the scale, float32 [B, K]."""


def empty_linear_state(batch: int, num_kv_heads: int, features: int, head_dim: int) -> LinearState:
    """Return the recurrent state of linear attention before the first token: all sums are empty.

    Args:
        batch: B.
        num_kv_heads: K.
        features: F, the last dim of what the feature map returns.
        head_dim: H.
    """
    heads = (batch, num_kv_heads)
    return LinearState(
        jnp.zeros((*heads, features, head_dim), jnp.float32),
        jnp.zeros((*heads, features), jnp.float32),
        jnp.full(heads, EMPTY, jnp.float32),
    )
