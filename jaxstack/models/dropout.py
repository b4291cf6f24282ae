"""Dropout (Srivastava et al. 2014) whose masks depend on step, layer, row and token, and on no layout of devices.

A key is one for a whole batch, or an array [B, T] with one for each token: `token_keys`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TOKEN_KEYS = "dropout_keys"
"""Name under which a batch has `token_keys`."""


def token_keys(key: jax.Array, rows: int, tokens: jax.Array) -> jax.Array:
    """A key for each token of the global batch, [rows, T].

    Args:
      tokens: int32 [T], the numbers of the tokens within their sequence, in the order in which they are stored.
    """
    of_row = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(of_row, tokens)


def fold_key(key: jax.Array | None, index: Any) -> jax.Array | None:
    """The key, or keys, for the part of the model of this number; None stays None."""
    return None if key is None else _each(lambda k: jax.random.fold_in(k, index), key)


def split_key(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Two keys, or arrays of keys, for two uses; None stays None."""
    if key is None:
        return None, None
    pair = _each(jax.random.split, key)
    return pair[..., 0], pair[..., 1]


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """x with a share `rate` of its elements 0 and the others scaled up; the identity without a key.

    Args:
      x: [B, T, ...], where there is a key for each token.
    """
    if key is None or rate == 0:
        return x
    kept = _each(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[key.ndim :]), key)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _each(function: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    for _ in range(keys.ndim):
        function = jax.vmap(function)
    return function(keys)
