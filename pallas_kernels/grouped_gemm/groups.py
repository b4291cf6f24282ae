"""Layout of groups of rows in an array: one after the other, each starting at a multiple of an alignment.

A kernel that works in tiles of rows needs every tile to belong to one group. The rows between the end of a group and
the start of the next are then padding. The number of rows is known while tracing, the sizes of the groups are not.
"""

import jax
import jax.numpy as jnp


def aligned_rows(rows: int, groups: int, alignment: int) -> int:
    """Return the most rows that `groups` groups, `rows` rows in all, take when padded to multiples of `alignment`."""
    most = rows + min(groups, rows) * (alignment - 1)
    return most // alignment * alignment


def group_bounds(sizes: jax.Array, alignment: int) -> tuple[jax.Array, jax.Array]:
    """Return where each group's rows start, and where they end with padding, int32 [G] each."""
    taken = (sizes + (alignment - 1)) // alignment * alignment
    ends = jnp.cumsum(taken, dtype=jnp.int32)
    return ends - taken, ends


def group_of_tiles(sizes: jax.Array, alignment: int, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Return the group of each tile of `alignment` rows, int32 [tiles], and how many tiles belong to any group."""
    ends = group_bounds(sizes, alignment)[1] // alignment
    first = jnp.arange(tiles, dtype=jnp.int32)
    group = jnp.searchsorted(ends, first, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(group, sizes.shape[0] - 1), ends[-1]


def realign(x: jax.Array, sizes: jax.Array, old: int, new: int, rows: int) -> jax.Array:
    """Copy groups of rows from alignment `old`, in x [R, D], to alignment `new`, in a result [rows, D].

    Rows outside of every group are 0.
    """
    starts, ends = group_bounds(sizes, new)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    group = jnp.minimum(group, sizes.shape[0] - 1)
    offset = row - starts[group]
    found = (offset >= 0) & (offset < sizes[group])
    source = jnp.where(found, group_bounds(sizes, old)[0][group] + offset, x.shape[0])
    return x.at[source].get(mode="fill", fill_value=0)
