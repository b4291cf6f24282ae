"""Splits a layer's backward pass for the zero-bubble schedule: activation gradients first, weight gradients later.

The backward of one layer is a list of operations. The first half consists of those that the input's gradient needs, the
second of the rest, from its matmuls on. Values that the second half reads from the first are kept, so nothing is
computed twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from jaxstack.parallel.pipeline.layer_vjp import SplitLayer, function_of, inlined, needed


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
