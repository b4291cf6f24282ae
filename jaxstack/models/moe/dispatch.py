"""Where the rows of each expert lie, and the two ways between tokens and rows, each the other's transpose. Both are
gathers, forward and backward: no scatter adds up rows in an order that differs from run to run.

Dims: t tokens, k experts a token, N = t k assignments, R rows, G experts here, D model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_gemm.groups import aligned_rows, group_bounds


class Rows(NamedTuple):
    """An arrangement of assignments in rows."""

    source: jax.Array
    """[R] int32: the assignment in each row, counted token by token; N where there is none."""
    place: jax.Array
    """[t, k] int32: the row of each assignment; R for those that have none."""


class Order(NamedTuple):
    """Assignments sorted by group, in their own order within one."""

    order: jax.Array
    """[N] int32: the assignments, sorted; those of no group last."""
    position: jax.Array
    """[N] int32: where each stands in it."""
    first: jax.Array
    """[G + 1] int32: where each group begins, and the last one ends."""


def sort_by_group(groups: jax.Array, count: int) -> Order:
    """Of int32 group ids [N], where `count` and above are of no group."""
    numbers = jnp.arange(groups.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((groups, numbers), num_keys=1, is_stable=True)
    position = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    first = jnp.searchsorted(ordered, jnp.arange(count + 1, dtype=groups.dtype), method="compare_all")
    return Order(order, position, first.astype(jnp.int32))


def arrange(assigned: jax.Array, count: int, alignment: int) -> tuple[Rows, jax.Array]:
    """Rows by group, each group from a multiple of `alignment` on, and the groups' sizes [G].

    Args:
      assigned: int32 [t, k], the group of each assignment; `count` and above are of none.
    """
    groups = assigned.reshape(-1)
    order, position, first = sort_by_group(groups, count)
    sizes = first[1:] - first[:-1]
    rows = aligned_rows(groups.shape[0], count, alignment)
    starts, ends = group_bounds(sizes, alignment)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), count - 1)
    offset = row - starts[group]
    there = (offset >= 0) & (offset < sizes[group])
    source = jnp.where(there, order.at[first[:-1][group] + offset].get(mode="clip"), groups.shape[0])
    shift = (starts - first[:-1]).at[groups].get(mode="fill", fill_value=0)
    place = jnp.where(groups < count, position + shift, rows)
    return Rows(source, place.reshape(assigned.shape)), sizes


def _spread(x: jax.Array, rows: Rows) -> jax.Array:
    return x.at[rows.source // rows.place.shape[1]].get(mode="fill", fill_value=0)


def _collect(y: jax.Array, rows: Rows) -> jax.Array:
    found = y.at[rows.place].get(mode="fill", fill_value=0)
    return found.sum(axis=1, dtype=jnp.promote_types(y.dtype, jnp.float32)).astype(y.dtype)


@jax.custom_vjp
def take_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """Tokens [t, D] -> [R, D], each token in the rows of its k assignments; rows of none are 0."""
    return _spread(x, rows)


def _take_forward(x: jax.Array, rows: Rows) -> tuple:
    return _spread(x, rows), rows


def _take_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _collect(gradient, rows), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def sum_rows(y: jax.Array, rows: Rows) -> jax.Array:
    """The sum of each token's rows: [R, D] -> [t, D], added up in float32."""
    return _collect(y, rows)


def _sum_forward(y: jax.Array, rows: Rows) -> tuple:
    return _collect(y, rows), rows


def _sum_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _spread(gradient, rows), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def take_weights(weights: jax.Array, rows: Rows) -> jax.Array:
    """The weights [t, k] of assignments, for the rows that they are in: [R], 0 where there is none."""
    return take_rows(weights.reshape(-1, 1), Rows(rows.source, rows.place.reshape(-1, 1)))[:, 0]
