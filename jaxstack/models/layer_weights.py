"""Preparation of layers' weights for use: all-gather, cast, and a scan that gathers one layer ahead (ZeRO-3).

A plain scan gathers a layer's weights in the iteration that uses them, so its first matmul has to wait. In
`run_prefetched` an iteration computes with weights that were gathered before, and gathers those of the next layer
meanwhile; in the backward pass it also reduce-scatters the gradients of the previous layer (as in PyTorch's FSDP, Zhao
et al. 2023, arXiv:2304.11277). The whole weights of two layers exist at a time, and the whole gradients of two. One
iteration of the compiled loop is two layers, so that the pair of buffers swaps roles without a copy.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxstack.parallel import gather_parameter
from jaxstack.parallel.sharding_context import current_context, is_sharded

Weights: TypeAlias = Any
"""An NNX state: a tree of `nnx.Variable`, of one layer or of a stack of layers."""


def gather_weights(state: Weights, dtype: jax.typing.DTypeLike) -> Weights:
    """All-gather a layer's parameters over the mesh axis `fsdp`, and cast matrices to `dtype`."""

    def gather(p: nnx.Variable) -> nnx.Variable:
        if not isinstance(p, nnx.Param):
            return p
        matmul = p.get_metadata().get("matmul")
        return p.replace(gather_parameter(p, dtype) if matmul is None else matmul.gather(p, dtype))

    return jax.tree.map(gather, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def gather_layers(states: Sequence[Weights], dtype: jax.typing.DTypeLike) -> list[Weights]:
    """All-gather and cast the weights of layers that a scan has sliced out of stacked arrays."""
    return [gather_weights(remove_layers_logical_axis(state), dtype) for state in states]


def add_layers_logical_axis(state: Weights) -> Weights:
    """Add the logical axis `layers` to the metadata of variables whose arrays have been stacked."""

    def relabel(p):
        return p.copy(logical_axes=("layers", *p.get_metadata()["logical_axes"]))

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def remove_layers_logical_axis(state: Weights) -> Weights:
    """Remove the logical axis `layers` from the metadata of variables whose arrays have been sliced."""

    def relabel(p: nnx.Variable) -> nnx.Variable:
        known = p.get_metadata()
        return p.copy(**{name: known[name][1:] for name in ("logical_axes", "whole_shape") if name in known})

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


Arrays: TypeAlias = Any
"""A tree of arrays."""

Layer = Callable[[jax.Array, Arrays, jax.Array], tuple[jax.Array, Arrays]]
"""(x, gathered weights, number of the layer) -> (x, losses: a tree of scalars)."""


def run_prefetched(
    make_layer: Callable[[Any], Layer],
    gather: Callable[[Arrays], Arrays],
    x: Float[Array, "..."],
    stacks: Arrays,
    shared: PyTree,
) -> tuple[Float[Array, "..."], Arrays]:
    """Scan over two or more layers, all-gathering the next layer's weights while one computes; differentiable.

    Args:
      make_layer: returns the layer, given the inputs that all layers share; the layer may be rematerialised.
      gather: gathers the stored weights of one layer; its gradient scatters their gradients.
      x: input of the first layer.
      stacks: stored weights, a tree of arrays with a leading dim of layers.
      shared: tree of inputs of all layers, which is not differentiated.

    Returns:
      x after the last layer, and the sums of the layers' losses.
    """
    arrays, fixed = _partition(shared, lambda leaf: isinstance(leaf, jax.Array))
    loop = _Loop(lambda arrays: make_layer(_join(arrays, fixed)), gather, jax.tree.leaves(stacks)[0].shape[0] - 1)
    run = jax.custom_vjp(lambda x, stacks, arrays: loop.forward(x, stacks, arrays, save=False)[0])
    run.defvjp(lambda x, stacks, arrays: loop.forward(x, stacks, arrays, save=True), loop.backward)
    return run(x, stacks, arrays)


class _Loop:
    """Forward and backward pass of the prefetching scan over layers 0 to `last`."""

    def __init__(self, make_layer: Callable[[Arrays], Layer], gather: Callable[[Arrays], Arrays], last: int):
        self._make_layer = make_layer
        self._gather = gather
        self.last = last
        self._context = current_context()
        self._pull_type: Any = None
        self._places: list[int | None] = []
        """Number of the argument that each leaf of the layer's `jax.vjp` equals; None: the leaf is a saved activation.
        Set when the forward pass is traced."""

    def forward(self, x: jax.Array, stacks: Arrays, shared: Arrays, *, save: bool) -> tuple[Any, Any]:
        """Run the layers; return (x, summed losses), and the inputs of `backward`, complete only if `save` is true."""
        with self._in_context():
            apply = self._apply if save else lambda *arguments: (self._run(*arguments), [])
            weights = self._weights(stacks, 0)
            (_, losses), rows = jax.eval_shape(apply, x, *weights, shared, jnp.int32(0))
            losses = jax.tree.map(lambda loss: jnp.zeros(loss.shape, loss.dtype), losses)

            def step(index: jax.Array, carry: Arrays) -> Any:
                x, weights, losses, saved = carry
                x, weights, following = jax.lax.optimization_barrier((x, weights, index + 1))
                following = self._weights(stacks, following)
                (x, loss), rows = apply(x, *weights, shared, index)
                return x, following, jax.tree.map(jnp.add, losses, loss), _put(saved, rows, index)

            saved = [_empty((self.last, *row.shape), row.dtype) for row in rows]
            x, weights, losses, saved = _in_pairs(step, (x, weights, losses, saved), range(self.last))
            (x, loss), rows = apply(x, *weights, shared, jnp.int32(self.last))
            return (x, jax.tree.map(jnp.add, losses, loss)), (stacks, shared, saved, rows)

    def backward(self, saved: tuple[Arrays, ...], cotangents: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Any, None]:
        """Return the gradients of x and of the stacked weights; None for the inputs that layers share."""
        stacks, shared, saved_rows, last_rows = saved
        d_x, d_losses = cotangents

        def layer_gradients(rows: Arrays, weights: Arrays, index: jax.Array, d_x: jax.Array) -> Any:
            return self._pull(rows, *weights, shared, index)((d_x, d_losses))

        def scatter(d_stacks: Arrays, d_weights: Arrays, index: jax.Array) -> Any:
            state = jax.tree.map(lambda stack: _at(stack, index), stacks)
            floats, fixed = _partition(state, _is_differentiable)
            pull = jax.vjp(lambda floats: self._gathered(_join(floats, fixed))[0], floats)[1]
            return _put(d_stacks, pull(d_weights)[0], index)

        def step(index: jax.Array, carry: Arrays) -> Any:
            *carry, following = jax.lax.optimization_barrier((*carry, index - 1))
            d_x, weights, d_weights, d_stacks = carry
            following = self._weights(stacks, following)
            d_stacks = scatter(d_stacks, d_weights, index + 1)
            d_x, d_weights = layer_gradients([_at(part, index) for part in saved_rows], weights, index, d_x)
            return d_x, following, d_weights, d_stacks

        with self._in_context():
            last = jnp.int32(self.last)
            floats = _partition(stacks, _is_differentiable)[0]
            d_stacks = jax.tree.map(lambda stack: _empty(stack.shape, stack.dtype), floats)
            carry = d_x, self._weights(stacks, self.last), last - 1
            d_x, weights, following = jax.lax.optimization_barrier(carry)
            following = self._weights(stacks, following)
            d_x, d_weights = layer_gradients(last_rows, weights, last, d_x)
            carry = d_x, following, d_weights, d_stacks
            carry = _in_pairs(step, carry, range(self.last - 1, 0, -1))
            # The index 0 is hidden from XLA, which would otherwise transpose a whole stack of saved values for one row.
            *carry, first = jax.lax.optimization_barrier((*carry, jnp.int32(0)))
            d_x, weights, d_weights, d_stacks = carry
            d_stacks = scatter(d_stacks, d_weights, first + 1)
            d_x, d_weights = layer_gradients([_at(part, first) for part in saved_rows], weights, first, d_x)
            return d_x, scatter(d_stacks, d_weights, first), None

    def _in_context(self) -> contextlib.AbstractContextManager[object]:
        # The backward pass may be traced outside of the sharding context.
        return contextlib.nullcontext() if self._context is None else self._context.entered()

    def _weights(self, stacks: Arrays, index: int | jax.Array) -> tuple[Any, Any]:
        return self._gathered(jax.tree.map(lambda stack: _at(stack, index), stacks))

    def _gathered(self, state: Arrays) -> tuple[Any, Any]:
        """All-gather a layer's weights; return (differentiable weights, all other leaves such as FP8 bytes)."""
        return _partition(self._gather(state), _is_differentiable)

    def _run(
        self, x: jax.Array, floats: Arrays, fixed: Arrays, shared: Arrays, index: jax.Array
    ) -> tuple[jax.Array, Any]:
        return self._make_layer(shared)(x, _join(floats, fixed), index)

    def _apply(self, x: jax.Array, floats: Arrays, *others: Arrays) -> tuple[Any, list[jax.Array]]:
        """Run a layer; return its results, and the activations that its backward pass needs."""
        results, pull = jax.vjp(lambda x, floats: self._run(x, floats, *others), x, floats)
        leaves, self._pull_type = jax.tree.flatten(pull)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((floats, *others)))}
        self._places = [places.get(id(leaf)) for leaf in leaves]
        return results, [leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None]

    def _pull(self, rows: list[jax.Array], *arguments: Arrays) -> Callable[..., tuple[jax.Array, Any]]:
        """Rebuild a layer's backward function (of `jax.vjp`) from saved activations, weights and shared inputs."""
        given = jax.tree.leaves(arguments)
        own = iter(rows)
        leaves = [next(own) if place is None else given[place] for place in self._places]
        return jax.tree.unflatten(self._pull_type, leaves)


def _in_pairs(step: Callable[[Any, Arrays], Arrays], carry: Arrays, order: range) -> Any:
    """Loop `carry = step(index, carry)` over `order`, with two steps per iteration of the compiled loop."""
    pairs = len(order) // 2

    def two_steps(number: jax.Array, carry: Arrays) -> Any:
        first = order.start + 2 * order.step * number
        return step(first + order.step, step(first, carry))

    if pairs:
        carry = jax.lax.fori_loop(0, pairs, two_steps, carry)
    for index in order[2 * pairs :]:
        carry = step(jnp.int32(index), carry)
    return carry


def _empty(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Create a buffer whose rows are all written before they are read; uninitialized where that is possible."""
    return jnp.zeros(shape, dtype) if is_sharded() else jax.lax.empty(shape, dtype)


def _at(stack: jax.Array, index: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _put(stacks: Arrays, rows: Arrays, index: int | jax.Array) -> Any:
    return jax.tree.map(lambda stack, row: jax.lax.dynamic_update_index_in_dim(stack, row, index, 0), stacks, rows)


def _is_differentiable(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def _partition(tree: PyTree, first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Split a tree into two trees: leaves for which `first` is true, and all other leaves; None marks the gaps."""
    return (
        jax.tree.map(lambda leaf: leaf if first(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if first(leaf) else leaf, tree),
    )


def _join(one: PyTree, other: PyTree) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)
