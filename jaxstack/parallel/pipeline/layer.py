"""Forward and backward of one layer as separate functions that meet in a buffer of residuals.

`jax.vjp` keeps whatever the layer's rematerialisation policy says. Of that, only what depends on the microbatch goes
into the buffer: weights, other views of them, and what all layers of a microbatch share are given to the backward pass
again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxstack.parallel.pipeline.operations import VIEWS, function_of, inlined

Layer = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array | None]]
"""(weights, x, shared by all layers of a microbatch, index of the layer) -> (x, loss of its own or None)."""


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """What `split_layer` found out about a layer."""

    layer: Layer
    structure: Any
    """Of the pullback, as a pytree."""
    sources: tuple[int | None, ...]
    """For each of its leaves the position among the known inputs and `views`' results, or None where it is saved."""
    views: Callable[..., list[jax.Array]]
    """Known inputs -> views of them that the pullback holds."""
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
        known = [*known, *self.views(*known)]
        leaves = [next(rest) if source is None else known[source] for source in self.sources]
        pullback = jax.tree.unflatten(self.structure, leaves)
        one = jnp.ones((), jnp.float32) if self.has_loss else None
        found, dx, *_ = pullback((gradient, one))
        return dx, found


def split_layer(layer: Layer, weights: Any, x: Any, shared: Any, index: Any) -> SplitLayer:
    """Traces the layer once, abstractly, for its residuals. Arguments are arrays or their shapes."""
    pulled: dict[str, Any] = {}

    def residuals(weights: Any, x: Any, shared: Any, index: Any) -> list[Any]:
        (_, loss), pullback = jax.vjp(layer, weights, x, shared, index)
        leaves, pulled["structure"] = jax.tree.flatten(pullback)
        pulled["has_loss"] = loss is not None
        pulled["in_host"] = [jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in leaves]
        return leaves

    closed = inlined(jax.make_jaxpr(residuals)(weights, x, shared, index))
    inputs, outputs = list(closed.jaxpr.invars), closed.jaxpr.outvars
    del inputs[len(jax.tree.leaves(weights))]  # x
    known, eqns = set(inputs), []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in VIEWS and all(isinstance(v, core.Var) and v in known for v in eqn.invars):
            known.update(eqn.outvars)
            eqns.append(eqn)
    is_known = [not isinstance(v, core.Literal) and v in known for v in outputs]
    seen = [v for v, given in zip(outputs, is_known, strict=True) if given and v not in inputs]
    positions = {v: i for i, v in enumerate([*inputs, *seen])}
    sources = tuple(positions[v] if given else None for v, given in zip(outputs, is_known, strict=True))
    new = [i for i, source in enumerate(sources) if source is None]
    saved = tuple(jax.ShapeDtypeStruct(outputs[i].aval.shape, outputs[i].aval.dtype) for i in new)
    in_host = tuple(pulled["in_host"][i] for i in new)
    views = function_of(eqns, inputs, seen, {})
    return SplitLayer(layer, pulled["structure"], sources, views, saved, in_host, pulled["has_loss"])
