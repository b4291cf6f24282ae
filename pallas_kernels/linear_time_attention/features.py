"""Feature maps: similarities of queries and keys as products of features, sim(q, k) = phi(q) . phi(k)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Features(NamedTuple):
    """Features of queries or keys: phi = exp(log_weight) * values."""

    values: jax.Array
    """[..., F]."""
    log_weight: jax.Array | None = None
    """[...], a constant to differentiation; None is 0. That of a query cancels in attention."""


class FeatureMap(Protocol):
    """Makes features [..., F] of queries and keys [..., H], whatever the dims before are."""

    def query(self, x: jax.Array) -> Features: ...

    def key(self, x: jax.Array) -> Features: ...


class Elementwise:
    """The same function for queries and keys, computed in float32 and returned in the dtype of the input."""

    def __init__(self, function: Callable[[jax.Array], jax.Array]):
        self.function = function

    def query(self, x: jax.Array) -> Features:
        return Features(self.function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype))

    key = query


def elu_plus_one(x: jax.Array) -> jax.Array:
    """elu(x) + 1, positive everywhere (Katharopoulos et al., arXiv:2006.16236)."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {"elu": elu_plus_one, "relu": jax.nn.relu}
