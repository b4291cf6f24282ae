"""Sorts (token, expert) assignments by expert, copies tokens to rows in that order, and sums results per token.

`take_rows` and `sum_rows` are each other's transpose. Both are gathers, forward and backward, so that no scatter adds
up rows in an order that differs between runs.

Dims: t tokens, k experts per token, N = t k assignments, R rows, G experts on this device, D model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm.groups import aligned_rows, group_bounds


class Rows(NamedTuple):
    """Mapping between (token, expert) assignments and the rows of an array that is sorted by expert."""

    source: Int[Array, " R"]
    """Assignment in each row, counted token by token; N for an empty row."""
    place: Int[Array, "t k"]
    """Row of each assignment; R for an assignment without a row."""


class Order(NamedTuple):
    """Result of sorting assignments by expert: permutation, its inverse, and the start of each expert's group."""

    order: Int[Array, " N"]
    """Assignments sorted by group; those of no group last."""
    position: Int[Array, " N"]
    """Index of each assignment in `order`."""
    first: Int[Array, " G+1"]
    """Start of each group in `order`, and the end of the last one."""


def sort_by_group(groups: Int[Array, " N"], count: int) -> Order:
    """Sort (token, expert) assignments by `groups`, their expert ids; ids >= `count` are sorted last, in no group."""
    numbers = jnp.arange(groups.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((groups, numbers), num_keys=1, is_stable=True)
    position = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    first = jnp.searchsorted(ordered, jnp.arange(count + 1, dtype=groups.dtype), method="compare_all")
    return Order(order, position, first.astype(jnp.int32))


def arrange(assigned: Int[Array, "t k"], count: int, alignment: int) -> tuple[Rows, Int[Array, " G"]]:
    """Assign (token, expert) pairs to rows of an array, sorted by group (expert), with each group's start aligned.

    Args:
      assigned: group of each assignment; `count` and above mean no group.

    Returns:
      The rows, and the size of each group.
    """
    groups = assigned.reshape(-1)
    order, position, first = sort_by_group(groups, count)
    sizes = first[1:] - first[:-1]
    rows = aligned_rows(groups.shape[0], count, alignment)
    starts, ends = group_bounds(sizes, alignment)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), count - 1)
    offset = row - starts[group]
    filled = (offset >= 0) & (offset < sizes[group])
    source = jnp.where(filled, order.at[first[:-1][group] + offset].get(mode="clip"), groups.shape[0])
    shift = (starts - first[:-1]).at[groups].get(mode="fill", fill_value=0)
    place = jnp.where(groups < count, position + shift, rows)
    return Rows(source, place.reshape(assigned.shape)), sizes


def _spread(x: jax.Array, rows: Rows) -> jax.Array:
    return x.at[rows.source // rows.place.shape[1]].get(mode="fill", fill_value=0)


def _collect(y: jax.Array, rows: Rows) -> jax.Array:
    found = y.at[rows.place].get(mode="fill", fill_value=0)
    return found.sum(axis=1, dtype=jnp.promote_types(y.dtype, jnp.float32)).astype(y.dtype)


@jax.custom_vjp
def take_rows(x: Float[Array, "t D"], rows: Rows) -> Float[Array, "R D"]:
    """Copy each token to the rows of its k experts; rows without a token are 0."""
    return _spread(x, rows)


def _take_forward(x: jax.Array, rows: Rows) -> tuple:
    return _spread(x, rows), rows


def _take_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _collect(gradient, rows), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def sum_rows(y: Float[Array, "R D"], rows: Rows) -> Float[Array, "t D"]:
    """Sum the k rows (expert outputs) of each token, in float32."""
    return _collect(y, rows)


def _sum_forward(y: jax.Array, rows: Rows) -> tuple:
    return _collect(y, rows), rows


def _sum_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _spread(gradient, rows), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def take_weights(weights: Float[Array, "t k"], rows: Rows) -> Float[Array, " R"]:
    """Copy the router's weight of each (token, expert) pair to its row; rows without a token get 0."""
    return take_rows(weights.reshape(-1, 1), Rows(rows.source, rows.place.reshape(-1, 1)))[:, 0]
