"""Values that layers return apart from the residual stream: their own losses, and sums for the metrics, by name."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@runtime_checkable
class Sums(Protocol):
    """Interface of the sums over tokens of one layer, or of all; a tree of arrays of which only `loss` has a gradient.

    Sums of several parts of a batch, in arrays of the same shapes, add up element by element.
    """

    @property
    def loss(self) -> Float[Array, "*layers"]:
        """The weighted loss, which is added to that of the model."""
        ...

    def of_layers(self, numbers: Int[Array, "*n"], count: int) -> "Sums":
        """Return the sums of all `count` layers of a model, where these are the sums [*n] of the layers `numbers`."""
        ...

    def metrics(self, name: str) -> dict[str, Float[Array, ""]]:
        """Return the metrics of the sums of all layers, given their name among the `LayerSums`."""
        ...


LayerSums: TypeAlias = Mapping[str, Sums]
"""Sums of a layer or of all layers, by name, which begins the names of the metrics; empty: there are none."""


class AuxiliaryLoss(NamedTuple):
    """A loss of a layer or of all layers, summed over tokens; its metric is the mean per token and layer."""

    loss: Float[Array, "*layers"]
    """The loss times its weight."""
    total: Float[Array, "*layers"]
    """The loss without its weight, which has no gradient."""
    tokens: Float[Array, "*layers"]
    """Number of tokens, for several layers that of all of them together."""

    def of_layers(self, numbers: Int[Array, "*n"], count: int) -> "AuxiliaryLoss":
        """Return the sums over layers, whichever they are."""
        return AuxiliaryLoss(*map(jnp.sum, self))

    def metrics(self, name: str) -> dict[str, Float[Array, ""]]:
        """Return the mean per token and layer."""
        return {name: self.total / jnp.maximum(self.tokens, 1.0)}


def auxiliary_loss(total: Float[Array, ""], weight: float, tokens: int) -> AuxiliaryLoss:
    """Return the loss of a layer, given its sum over a number of tokens, and its weight."""
    return AuxiliaryLoss(weight * total, jax.lax.stop_gradient(total), jnp.float32(tokens))


def add_sums(one: LayerSums, other: LayerSums) -> LayerSums:
    """Add the sums of other tokens or layers; either may lack some."""
    both = {name: jax.tree.map(jnp.add, sums, other[name]) for name, sums in one.items() if name in other}
    return {**one, **other, **both}


def total_loss(sums: LayerSums) -> Float[Array, ""]:
    """Return the sum of all losses."""
    return sum((own.loss for own in sums.values()), jnp.zeros((), jnp.float32))
