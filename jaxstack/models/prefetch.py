"""Layers in a loop whose weights arrive one layer ahead of their use, and whose gradients leave one layer behind.

A plain scan gathers a layer's weights (ZeRO-3) in the iteration that uses them, so the first matmul waits. Here an
iteration computes with the weights that came with it, and gathers the next layer's meanwhile; in the backward pass it
also scatters the gradients of the layer before it (prefetching as in PyTorch's FSDP, Zhao et al. 2023,
arXiv:2304.11277). Two layers' weights exist at a time, and two layers' whole gradients. A turn of the compiled loop is
two layers: the pair of buffers changes roles without a copy.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.parallel.context import current_context, is_sharded

Layer = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""(x, whole weights, number of the layer) -> (x, losses: a tree of scalars)."""


def run_prefetched(
    layer: Callable[[Any], Layer], gather: Callable[[Any], Any], x: jax.Array, stacks: Any, shared: Any
) -> tuple[jax.Array, Any]:
    """x through all layers, at least two, and the sums of their losses.

    Args:
      layer: (what all layers share) -> the layer; may be rematerialised, see `jaxstack.models.remat`.
      gather: one layer's stored weights -> whole ones; its gradient is the way back.
      stacks: the stored weights, a tree of arrays with a leading dim of layers.
      shared: a tree that all layers read; nothing in it is differentiated.
    """
    arrays, fixed = _partition(shared, lambda leaf: isinstance(leaf, jax.Array))
    loop = _Loop(lambda arrays: layer(_join(arrays, fixed)), gather, jax.tree.leaves(stacks)[0].shape[0] - 1)
    run = jax.custom_vjp(lambda x, stacks, arrays: loop.forward(x, stacks, arrays, keep=False)[0])
    run.defvjp(lambda x, stacks, arrays: loop.forward(x, stacks, arrays, keep=True), loop.backward)
    return run(x, stacks, arrays)


class _Loop:
    """The layers 0 to `last`."""

    def __init__(self, layer: Callable[[Any], Layer], gather: Callable[[Any], Any], last: int):
        self._layer, self._gather, self.last, self._context = layer, gather, last, current_context()
        self._pull_type: Any = None
        self._places: list[int | None] = []
        """Of the leaves of the layer's `jax.vjp`, which argument each is; set where the forward pass is traced."""

    def forward(self, x: jax.Array, stacks: Any, shared: Any, *, keep: bool) -> tuple[Any, Any]:
        """((x, losses), what the backward pass needs)."""
        with self._in_rules():
            apply = self._apply if keep else lambda *arguments: (self._run(*arguments), [])
            weights = self._weights(stacks, 0)
            (_, losses), rows = jax.eval_shape(apply, x, *weights, shared, jnp.int32(0))
            losses = jax.tree.map(lambda loss: jnp.zeros(loss.shape, loss.dtype), losses)

            def step(index: Any, carry: Any) -> Any:
                x, weights, losses, kept = carry
                x, weights, following = jax.lax.optimization_barrier((x, weights, index + 1))
                following = self._weights(stacks, following)
                (x, loss), rows = apply(x, *weights, shared, index)
                return x, following, jax.tree.map(jnp.add, losses, loss), _put(kept, rows, index)

            kept = [_empty((self.last, *row.shape), row.dtype) for row in rows]
            x, weights, losses, kept = _in_pairs(step, (x, weights, losses, kept), range(self.last))
            (x, loss), rows = apply(x, *weights, shared, jnp.int32(self.last))
            return (x, jax.tree.map(jnp.add, losses, loss)), (stacks, shared, kept, rows)

    def backward(self, saved: Any, cotangents: tuple[jax.Array, Any]) -> tuple[jax.Array, Any, None]:
        """The gradients of x and of the stacks."""
        stacks, shared, kept, last_rows = saved
        d_x, d_losses = cotangents

        def pulled(rows: Any, weights: Any, index: Any, d_x: jax.Array) -> Any:
            return self._pull(rows, *weights, shared, index)((d_x, d_losses))

        def scattered(d_stacks: Any, d_weights: Any, index: Any) -> Any:
            state = jax.tree.map(lambda stack: _at(stack, index), stacks)
            floats, fixed = _partition(state, _is_differentiable)
            pull = jax.vjp(lambda floats: self._gathered(_join(floats, fixed))[0], floats)[1]
            return _put(d_stacks, pull(d_weights)[0], index)

        def step(index: Any, carry: Any) -> Any:
            *carry, following = jax.lax.optimization_barrier((*carry, index - 1))
            d_x, weights, d_weights, d_stacks = carry
            following = self._weights(stacks, following)
            d_stacks = scattered(d_stacks, d_weights, index + 1)
            d_x, d_weights = pulled([_at(part, index) for part in kept], weights, index, d_x)
            return d_x, following, d_weights, d_stacks

        with self._in_rules():
            last, floats = jnp.int32(self.last), _partition(stacks, _is_differentiable)[0]
            d_stacks = jax.tree.map(lambda stack: _empty(stack.shape, stack.dtype), floats)
            carry = d_x, self._weights(stacks, self.last), last - 1
            d_x, weights, following = jax.lax.optimization_barrier(carry)
            following = self._weights(stacks, following)
            d_x, d_weights = pulled(last_rows, weights, last, d_x)
            carry = d_x, following, d_weights, d_stacks
            carry = _in_pairs(step, carry, range(self.last - 1, 0, -1))
            # The number 0 is hidden from XLA, which would transpose a whole stack of kept values for one row's use.
            *carry, first = jax.lax.optimization_barrier((*carry, jnp.int32(0)))
            d_x, weights, d_weights, d_stacks = carry
            d_stacks = scattered(d_stacks, d_weights, first + 1)
            d_x, d_weights = pulled([_at(part, first) for part in kept], weights, first, d_x)
            return d_x, scattered(d_stacks, d_weights, first), None

    def _in_rules(self) -> Any:
        # The backward pass may be traced outside of them.
        return contextlib.nullcontext() if self._context is None else self._context.entered()

    def _weights(self, stacks: Any, index: Any) -> tuple[Any, Any]:
        return self._gathered(jax.tree.map(lambda stack: _at(stack, index), stacks))

    def _gathered(self, state: Any) -> tuple[Any, Any]:
        """Whole weights, those that have a gradient apart from the others (FP8 bytes)."""
        return _partition(self._gather(state), _is_differentiable)

    def _run(self, x: jax.Array, floats: Any, fixed: Any, shared: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        return self._layer(shared)(x, _join(floats, fixed), index)

    def _apply(self, x: jax.Array, floats: Any, *others: Any) -> tuple[Any, list[jax.Array]]:
        """The layer's results, and what its `jax.vjp` keeps beside the arguments but x."""
        results, pull = jax.vjp(lambda x, floats: self._run(x, floats, *others), x, floats)
        leaves, self._pull_type = jax.tree.flatten(pull)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((floats, *others)))}
        self._places = [places.get(id(leaf)) for leaf in leaves]
        return results, [leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None]

    def _pull(self, rows: list[jax.Array], *arguments: Any) -> Callable[..., tuple[jax.Array, Any]]:
        """The second result of `jax.vjp` again, from what it kept of the layer and the arguments but x."""
        given, own = jax.tree.leaves(arguments), iter(rows)
        leaves = [next(own) if place is None else given[place] for place in self._places]
        return jax.tree.unflatten(self._pull_type, leaves)


def _in_pairs(step: Callable[[Any, Any], Any], carry: Any, order: range) -> Any:
    """`carry = step(index, carry)` for each index of `order`, in a loop of two a turn."""
    pairs = len(order) // 2

    def turn(number: jax.Array, carry: Any) -> Any:
        first = order.start + 2 * order.step * number
        return step(first + order.step, step(first, carry))

    if pairs:
        carry = jax.lax.fori_loop(0, pairs, turn, carry)
    for index in order[2 * pairs :]:
        carry = step(jnp.int32(index), carry)
    return carry


def _empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A buffer each row of which is written before it is read."""
    return jnp.zeros(shape, dtype) if is_sharded() else jax.lax.empty(shape, dtype)


def _at(stack: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _put(stacks: Any, rows: Any, index: Any) -> Any:
    return jax.tree.map(lambda stack, row: jax.lax.dynamic_update_index_in_dim(stack, row, index, 0), stacks, rows)


def _is_differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def _partition(tree: Any, first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The tree twice: with the leaves for which `first` holds, and with the others; None in the place of the rest."""
    return (
        jax.tree.map(lambda leaf: leaf if first(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if first(leaf) else leaf, tree),
    )


def _join(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)
