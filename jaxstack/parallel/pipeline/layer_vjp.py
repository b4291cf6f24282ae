"""Splits a layer for pipelines into forward and backward functions, with the residuals between them as arrays to store.

The layer's rematerialisation policy decides which residuals `jax.vjp` keeps. Only those that depend on the microbatch
are stored in the buffer, each once. The backward pass gets the weights, and what all layers of a microbatch share, as
arguments again, and recomputes cheap operations on them (`VIEWS`), and reshapes and transposes of stored values.

For the zero-bubble schedule the backward pass is split once more: activation gradients first, weight gradients later.
The first half consists of the operations that the input's gradient needs, the second of the rest, from its matmuls on.
Values that the second half reads from the first are kept, so nothing is computed twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

SAME_SIZE_VIEWS = ("reshape", "transpose")
VIEWS = (*SAME_SIZE_VIEWS, "convert_element_type")
"""Operations that cost so little that they are repeated wherever a value is read."""


def needed(eqns: list[Any], outputs: list[Any], stop: str | None = None) -> list[bool]:
    """Return a flag for each operation of a jaxpr: True if `outputs` depend on it.

    Dependencies are not followed through operations of the primitive `stop`: their inputs do not count.
    """
    wanted = {v for v in outputs if not isinstance(v, core.Literal)}
    flags = []
    for eqn in reversed(eqns):
        flags.append(any(v in wanted for v in eqn.outvars))
        if flags[-1] and eqn.primitive.name != stop:
            wanted |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
    return flags[::-1]


def function_of(eqns: list[Any], inputs: list[Any], outputs: list[Any], values: dict[Any, Any]) -> Any:
    """Return a function that evaluates the jaxpr operations `eqns` one by one, from `inputs` to `outputs`."""

    def run(*arguments: Any) -> list[Any]:
        known = {**values, **dict(zip(inputs, arguments, strict=True))}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else known[v]

        for eqn in eqns:
            known.update(zip(eqn.outvars, _apply(eqn, map(read, eqn.invars)), strict=True))
        return [read(v) for v in outputs]

    return run


def _apply(eqn: Any, inputs: Any) -> Any:
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return found if eqn.primitive.multiple_results else [found]


_WRAPPERS = ("checkpoint", "remat", "remat2", "pjit", "jit", "closed_call", "core_call")


def inlined(closed: Any) -> Any:
    """Inline the nested calls of a closed jaxpr, so that each operation can be scheduled separately.

    Equal views of a value are merged.
    """
    views: dict[Any, Any] = {}

    def apply(eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive.name not in VIEWS:
            return _apply(eqn, inputs)
        # With the result stands the value, so that no other one gets its id.
        key = eqn.primitive.name, id(inputs[0]), str(eqn.outvars[0].aval), str(eqn.params)
        if len(inputs) > 1 or key not in views:
            views[key] = inputs, _apply(eqn, inputs)
        return views[key][1]

    def run(closed: Any, arguments: Any) -> list[Any]:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else known[v]

        for eqn in closed.jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in _WRAPPERS else None
            if inner is None:
                found = apply(eqn, inputs)
            else:
                found = run(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, []), inputs)
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(lambda *arguments: run(closed, arguments))(*closed.in_avals)


Layer = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""(weights, x, shared by all layers of a microbatch, index of the layer) -> (x, its own sums).

Own sums are trees of float32 arrays by name; the derivatives of its leaves are added to those of the loss.
"""


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """Forward and backward pass of a layer as separate functions, with the residuals between them as arrays."""

    layer: Layer
    structure: Any
    """Tree structure of the pullback of `jax.vjp`."""
    sources: tuple[int, ...]
    """Index of each leaf of the pullback in [*known inputs, *views(known), *saved, *saved_views(saved)]."""
    views: Callable[..., list[jax.Array]]
    """Function of the known inputs that returns the views of them that the pullback holds."""
    kept: tuple[int, ...]
    """Positions of the pullback's leaves that are saved."""
    saved_views: Callable[..., list[jax.Array]]
    """Function of the saved values that returns the views of them that the pullback holds."""
    saved: tuple[jax.ShapeDtypeStruct, ...]
    in_host: tuple[bool, ...]
    """True for each saved value that the rematerialisation policy offloads to host memory."""
    own: Any
    """Shapes of the layer's own sums."""

    def forward(self, weights: Any, x: jax.Array, shared: Any, index: jax.Array) -> tuple[jax.Array, Any, list[Any]]:
        """Run the layer: return (its output, its own sums, the values to save for the backward pass)."""
        (y, own), pullback = jax.vjp(self.layer, weights, x, shared, index)
        leaves = jax.tree.leaves(pullback)
        return y, own, [leaves[i] for i in self.kept]

    def backward(
        self, saved: list[jax.Array], gradient: jax.Array, weights: Any, shared: Any, index: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run the layer's backward pass from saved values: return (gradient of x, gradient of the weights).

        They are the gradients of the sum of the loss and the layer's own sums.
        """
        known = jax.tree.leaves((weights, shared, index))
        values = [*known, *self.views(*known), *saved, *self.saved_views(*saved)]
        pullback = jax.tree.unflatten(self.structure, [values[source] for source in self.sources])
        ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), self.own)
        found, dx, *_ = pullback((gradient, ones))
        return dx, found


def split_layer(layer: Layer, weights: Any, x: Any, shared: Any, index: Any) -> SplitLayer:
    """Split a layer into a forward and a backward function by tracing it. Arguments are arrays or their shapes."""
    pulled: dict[str, Any] = {}

    def residuals(weights: Any, x: Any, shared: Any, index: Any) -> list[Any]:
        (_, own), pullback = jax.vjp(layer, weights, x, shared, index)
        leaves, pulled["structure"] = jax.tree.flatten(pullback)
        pulled["own"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
        pulled["in_host"] = [jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in leaves]
        return leaves

    closed = inlined(jax.make_jaxpr(residuals)(weights, x, shared, index))
    inputs = list(closed.jaxpr.invars)
    avals = closed.out_avals
    del inputs[len(jax.tree.leaves(weights))]  # x
    # Literals, which cannot be looked up, go by their position.
    outputs: list[Any] = [v if isinstance(v, core.Var) else i for i, v in enumerate(closed.jaxpr.outvars)]
    views, known = _views(closed.jaxpr.eqns, inputs, VIEWS)
    seen = [v for v in dict.fromkeys(outputs) if v in known and v not in inputs]
    new = [v for v in dict.fromkeys(outputs) if v not in known and v not in inputs]
    saved_views, made = _views(closed.jaxpr.eqns, new, SAME_SIZE_VIEWS)
    derived = [v for v in new if v in made]
    saved = [v for v in new if v not in made]
    positions = {v: i for i, v in enumerate([*inputs, *seen, *saved, *derived])}
    kept = tuple(outputs.index(v) for v in saved)
    return SplitLayer(
        layer,
        pulled["structure"],
        tuple(positions[v] for v in outputs),
        function_of(views, inputs, seen, {}),
        kept,
        function_of(saved_views, saved, derived, {}),
        tuple(jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in kept),
        tuple(pulled["in_host"][i] for i in kept),
        pulled["own"],
    )


def _views(eqns: list[Any], values: list[Any], names: tuple[str, ...]) -> tuple[list[Any], set[Any]]:
    """Return (operations named in `names` that depend on nothing but `values`, set of their results)."""
    found = []
    made = set()
    for eqn in eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        if eqn.primitive.name in names and inputs and all(v in made or v in values for v in inputs):
            made.update(eqn.outvars)
            found.append(eqn)
    return found, made


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """The two halves of a layer's backward pass: gradients of activations first, those of weight matrices later."""

    first: Callable[..., list[Any]]
    second: Callable[..., list[Any]]
    structure: Any
    """Tree structure of the weights."""
    early: tuple[int, ...]
    """Positions of the weights whose gradients the first half computes: vectors, whose gradients cost nothing."""
    late: tuple[int, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]

    def backward(
        self, saved: list[jax.Array], gradient: jax.Array, weights: Any, shared: Any, index: jax.Array
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Run the first half of the backward pass: return (gradient of x, early weight gradients, values to keep).

        The tree of weight gradients has None where the second half computes them, from the values to keep.
        """
        dx, *rest = self.first(*jax.tree.leaves((saved, gradient, weights, shared, index)))
        done = dict(zip(self.early, rest[: len(self.early)], strict=True))
        return dx, self._tree(done), rest[len(self.early) :]

    def weights(self, kept: list[jax.Array]) -> Any:
        """Compute the weight gradients that the first half of the backward pass postponed, from the values it saved.

        The tree of weight gradients has None where the first half computed them.
        """
        return self._tree(dict(zip(self.late, self.second(*kept), strict=True)))

    def _tree(self, found: dict[int, Any]) -> Any:
        return jax.tree.unflatten(self.structure, [found.get(i) for i in range(self.structure.num_leaves)])


def split_backward(
    layer: SplitLayer, weights: Any, x: Any, shared: Any, index: Any, at_once: Any = None
) -> SplitBackward:
    """Split a layer's backward pass: first gradients of its input and vectors (norm scales, ...), later of matrices.

    `weights`, `x`, `shared` and `index` are arguments of the layer, or their shapes.

    Args:
      at_once: tree of bools like `weights`: True for leaves whose gradient the first half must compute; it always
        computes those of vectors.
    """
    flat_weights, structure = jax.tree.flatten(weights)
    arguments = (list(layer.saved), x, weights, shared, index)
    leaves, tree = jax.tree.flatten(arguments)

    def backward(*leaves: Any) -> list[Any]:
        dx, found = layer.backward(*jax.tree.unflatten(tree, leaves))
        return [dx, *jax.tree.leaves(found)]

    flags = jax.tree.leaves(at_once) or [False] * len(flat_weights)
    early = tuple(i for i, w in enumerate(flat_weights) if len(w.shape) < 2 or flags[i])
    late = tuple(i for i in range(len(flat_weights)) if i not in early)
    closed = inlined(jax.make_jaxpr(backward)(*leaves))
    outputs = closed.jaxpr.outvars
    now = [outputs[0], *(outputs[1 + i] for i in early)]
    later = [outputs[1 + i] for i in late]
    first, second, kept = _partition(closed, now, later)
    return SplitBackward(first, second, structure, early, late, kept)


def _partition(closed: Any, now: list[Any], later: list[Any]) -> tuple[Any, Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Split a jaxpr into two functions: the first returns the outputs `now` and what the second needs for `later`.

    Also returns the shapes of the values that the first function keeps for the second.
    """
    jaxpr = closed.jaxpr
    in_first = needed(jaxpr.eqns, now)
    rest = [eqn for eqn, wanted in zip(jaxpr.eqns, in_first, strict=True) if not wanted]
    # A half that begins with its matmuls keeps their operands, which are few and in the compute dtype.
    in_second = needed(rest, later, stop="dot_general")
    second = [eqn for eqn, wanted in zip(rest, in_second, strict=True) if wanted]
    made = {v for eqn in second for v in eqn.outvars}
    known = set(jaxpr.constvars)
    read = [v for v in [v for eqn in second for v in eqn.invars] + later if not isinstance(v, core.Literal)]
    kept = [v for v in dict.fromkeys(read) if v not in made and v not in known]
    others = [eqn for eqn in jaxpr.eqns if not made.intersection(eqn.outvars)]
    first = [eqn for eqn, wanted in zip(others, needed(others, now + kept), strict=True) if wanted]
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    run_first = function_of(first, list(jaxpr.invars), now + kept, values)
    run_second = function_of(second, kept, later, values)
    return run_first, run_second, tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept)
