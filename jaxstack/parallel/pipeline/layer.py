"""Forward and backward of one layer as separate functions that meet in a buffer of residuals.

`jax.vjp` keeps whatever the layer's rematerialisation policy says. Of that, only what was computed goes into the
buffer: weights, and what all layers of a microbatch share, are given to the backward pass again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array | None]]
"""(weights, x, shared by all layers of a microbatch, index of the layer) -> (x, loss of its own or None)."""


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """What `split_layer` found out about a layer."""

    layer: Layer
    structure: Any
    """Of the pullback, as a pytree."""
    sources: tuple[int | None, ...]
    """For each of its leaves the position among the known inputs, or None where it is saved."""
    saved: tuple[jax.ShapeDtypeStruct, ...]
    in_host: tuple[bool, ...]
    """For each of those saved, whether the rematerialisation policy keeps it in host memory."""
    has_loss: bool

    def forward(self, weights: Any, x: jax.Array, shared: Any, index: jax.Array) -> tuple[jax.Array, Any, list[Any]]:
        """(y, the layer's own loss or None, what to save)."""
        (y, loss), pullback = jax.vjp(self.layer, weights, x, shared, index)
        leaves = jax.tree.leaves(pullback)
        return y, loss, [leaf for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def backward(
        self, saved: list[jax.Array], gradient: jax.Array, weights: Any, shared: Any, index: jax.Array
    ) -> tuple[jax.Array, Any]:
        """(gradient of x, gradient of the weights) of the sum of the loss and the layer's own."""
        known, rest = jax.tree.leaves((weights, shared, index)), iter(saved)
        leaves = [next(rest) if source is None else known[source] for source in self.sources]
        pullback = jax.tree.unflatten(self.structure, leaves)
        one = jnp.ones((), jnp.float32) if self.has_loss else None
        found, dx, *_ = pullback((gradient, one))
        return dx, found


def split_layer(layer: Layer, weights: Any, x: Any, shared: Any, index: Any) -> SplitLayer:
    """Traces the layer once, abstractly, for its residuals. Arguments are arrays or their shapes."""
    found: dict[str, Any] = {}

    def trace(weights: Any, x: Any, shared: Any, index: Any) -> Any:
        (y, loss), pullback = jax.vjp(layer, weights, x, shared, index)
        leaves, structure = jax.tree.flatten(pullback)
        # An input that is kept as it is appears as the very same object.
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, shared, index)))}
        found["structure"], found["sources"] = structure, tuple(known.get(id(leaf)) for leaf in leaves)
        found["has_loss"] = loss is not None
        saved = [leaf for leaf, source in zip(leaves, found["sources"], strict=True) if source is None]
        found["in_host"] = tuple(jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in saved)
        return y, saved

    _, saved = jax.eval_shape(trace, weights, x, shared, index)
    return SplitLayer(layer, found["structure"], found["sources"], tuple(saved), found["in_host"], found["has_loss"])
