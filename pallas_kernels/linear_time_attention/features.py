"""Feature maps phi for linear attention: the similarity of a query and a key is phi(q) . phi(k)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Features(NamedTuple):
    """Features phi of queries or keys, stored as a scale and values: phi = exp(log_weight) * values."""

    values: jax.Array
    """Array [..., F]."""
    log_weight: jax.Array | None = None
    """Array [...] without gradient; None means 0. For queries it cancels in attention."""


class FeatureMap(Protocol):
    """Interface of feature maps, which turn queries and keys [..., H] into features [..., F]."""

    def query(self, x: Float[Array, "*tokens H"]) -> Features:
        """Return the features of queries [..., H]."""
        ...

    def key(self, x: Float[Array, "*tokens H"]) -> Features:
        """Return the features of keys [..., H]."""
        ...


class Elementwise:
    """Feature map that applies one function, in float32, to both queries and keys."""

    def __init__(self, function: Callable[[jax.Array], jax.Array]):
        self.function = function

    def query(self, x: Float[Array, "*tokens H"]) -> Features:
        """Apply the feature function to queries or keys [..., H]."""
        return Features(self.function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype))

    key = query


def elu_plus_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return elu(x) + 1, a feature function that is positive everywhere (Katharopoulos et al., arXiv:2006.16236)."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {"elu": elu_plus_one, "relu": jax.nn.relu}
