"""Dropout (Srivastava et al. 2014) with masks that depend on step, layer, row and token, but not on the mesh.

A key is either one for a whole batch or an array [B, T] with one key per token, from `token_keys`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

TOKEN_KEYS = "dropout_keys"
"""Name of the `token_keys` in a batch."""


def token_keys(key: Key[Array, ""], rows: int, tokens: Int[Array, " T"]) -> Key[Array, "rows T"]:
    """Create a dropout key for each token of the global batch.

    Args:
      tokens: numbers of the tokens within their sequence, in the order in which they are stored.
    """
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(row_keys, tokens)


def fold_key(key: Key[Array, "..."] | None, index: int | jax.Array) -> Key[Array, "..."] | None:
    """Derive the dropout key (or keys per token) of one part of the model from the part's index; None stays None."""
    return None if key is None else _map_keys(lambda k: jax.random.fold_in(k, index), key)


def split_key(key: Key[Array, "..."] | None) -> tuple[Key[Array, "..."] | None, Key[Array, "..."] | None]:
    """Split a dropout key, or each of an array of keys, into two; None stays None."""
    if key is None:
        return None, None
    pair = _map_keys(jax.random.split, key)
    return pair[..., 0], pair[..., 1]


def drop(x: Float[Array, "..."], rate: float, key: Key[Array, "..."] | None) -> Float[Array, "..."]:
    """Apply dropout: set a fraction `rate` of the elements of x to 0, and scale up the others.

    Args:
      x: activations; [B, T, ...] if there is a key for each token.
      key: one key, or keys [B, T]; None: x is returned unchanged.
    """
    if key is None or rate == 0:
        return x
    kept = _map_keys(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[key.ndim :]), key)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _map_keys(function: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    for _ in range(keys.ndim):
        function = jax.vmap(function)
    return function(keys)
