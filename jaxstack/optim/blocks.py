"""Cuts parameter matrices into blocks for Shampoo and SOAP, and periodically recomputes each block's preconditioner.

Blocks depend on the parameter's shape only, not on the layout, so that all layouts give the same result. Where the
shards of a parameter are multiples of the block, each block is on one device, which refreshes it.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxstack.parallel.rules import state_spec


class Blocks(NamedTuple):
    """Division of a parameter, viewed as a matrix of its last `inputs` + `outputs` dims, into blocks of equal size."""

    shape: tuple[int, ...]
    inputs: int
    outputs: int
    rows: tuple[int, int]
    """Number of blocks along the matrix's rows, and rows of each."""
    columns: tuple[int, int]
    """Number of blocks along the matrix's columns, and columns of each."""

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """Sizes of the dims in front of the matrix, such as layers and experts."""
        return self.shape[: len(self.shape) - self.inputs - self.outputs]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Number of rows and columns of the parameter viewed as a matrix."""
        cut = len(self.shape) - self.outputs
        return math.prod(self.shape[cut - self.inputs : cut]), math.prod(self.shape[cut:])

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Shape of the grid of blocks: batch dims, row blocks, column blocks, with 1s to keep the parameter's rank."""
        return (*self.batch_dims, self.rows[0], *(1,) * (self.inputs - 1), self.columns[0], *(1,) * (self.outputs - 1))

    def split(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Cut an array of the parameter's shape into blocks [*grid_shape, rows, columns], padded with zeros."""
        (m, rows), (n, columns) = self.rows, self.columns
        height, width = self.matrix_shape
        x = x.reshape(*self.batch_dims, height, width)
        if (m * rows, n * columns) != (height, width):
            x = jnp.pad(x, [(0, 0)] * len(self.batch_dims) + [(0, m * rows - height), (0, n * columns - width)])
        x = jnp.moveaxis(x.reshape(*self.batch_dims, m, rows, n, columns), -3, -2)
        return x.reshape(*self.grid_shape, rows, columns)

    def join(self, blocks: Float[Array, "..."]) -> Float[Array, "..."]:
        """Put blocks back together into an array of the parameter's shape: the inverse of `split`."""
        (m, rows), (n, columns) = self.rows, self.columns
        height, width = self.matrix_shape
        x = jnp.moveaxis(blocks.reshape(*self.batch_dims, m, n, rows, columns), -3, -2)
        return x.reshape(*self.batch_dims, m * rows, n * columns)[..., :height, :width].reshape(self.shape)

    def needs_refresh(self, path: str, count: Int[Array, ""], every: int) -> Bool[Array, "..."]:
        """Return a mask [*grid_shape]: True for the blocks whose preconditioner is recomputed at step `count`.

        Each block is refreshed every `every` steps. Blocks of a matrix, and matrices of a layer, are staggered; layers
        are not, because they may be stored in one array or in several.
        """
        m = self.rows[0]
        n = self.columns[0]
        offset = zlib.crc32("".join(c for c in path if not c.isdigit()).encode()) % every
        turn = offset + jnp.arange(m)[:, None] * n + jnp.arange(n)
        flags = (count + turn) % every == 0
        return jnp.broadcast_to(flags.reshape(self.grid_shape[len(self.batch_dims) :]), self.grid_shape)


def choose_blocks(shape: Sequence[int], inputs: int, outputs: int, limit: int) -> Blocks:
    """Choose how a parameter's matrix is cut into blocks of at most `limit` rows and columns.

    Args:
      shape: its shape; the last `inputs` + `outputs` dims form its matrix.
      inputs, outputs: as of `MatrixShapeRule`.
      limit: largest number of rows and columns of a block. Blocks have equal size; a matrix is padded only if no number
        of blocks up to twice the smallest divides it.
    """
    whole = Blocks(tuple(shape), inputs, outputs, (1, 1), (1, 1))
    height, width = whole.matrix_shape
    return whole._replace(rows=_equal_parts(height, limit), columns=_equal_parts(width, limit))


def _equal_parts(size: int, limit: int) -> tuple[int, int]:
    fewest = -(-size // limit)
    for count in range(fewest, 2 * fewest + 1):
        if size % count == 0:
            return count, size // count
    return fewest, -(-size // fewest)


Refresh = Callable[..., tuple[jax.Array, ...]]
"""(one block's arrays) -> those of them that are renewed, the last ones."""


def refresh(
    first: Bool[Array, ""],
    due: Bool[Array, "..."],
    start: Refresh,
    renew: Refresh,
    kept: tuple[jax.Array, ...],
    renewed: tuple[jax.Array, ...],
    blocks: Blocks,
    spec: PartitionSpec | None,
) -> tuple[jax.Array, ...]:
    """Recompute the state arrays of the blocks that are due, each block on the device that stores it.

    Blocks are renewed one after the other: a batched decomposition is slower on a GPU than a loop over single ones.

    Args:
      first: True at the first step, at which `start` makes the arrays of every block.
      due: [*grid_shape], the blocks that `renew` is called for at another step.
      start, renew: functions of one block's arrays, `kept` and `renewed`, that return new `renewed`.
      kept: arrays [*grid_shape, ...] that are read only.
      renewed: arrays [*grid_shape, ...] that are renewed.
      blocks: the blocks of the parameter.
      spec: the parameter's PartitionSpec on the mesh in context; None: it is on one device.

    Returns:
      The new `renewed`.
    """
    rank = len(blocks.grid_shape)
    count = len(kept)

    def local(first: jax.Array, due: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        flat = tuple(x.reshape(-1, *x.shape[rank:]) for x in arrays)
        case = jnp.where(first, 2, due.reshape(-1).astype(jnp.int32))
        cases = (lambda *block: block[count:], renew, start)
        found = jax.lax.map(lambda item: jax.lax.switch(item[0], cases, *item[1]), (case, flat))
        return tuple(x.reshape(old.shape) for x, old in zip(found, arrays[count:], strict=True))

    mesh = jax.sharding.get_abstract_mesh()
    if spec is None or mesh.empty or mesh.size == 1:
        return local(first, due, *kept, *renewed)
    grid = _grid_spec(mesh, spec, blocks)
    specs = tuple(grid for _ in (*kept, *renewed))
    return jax.shard_map(
        local,
        in_specs=(PartitionSpec(), grid, *specs),
        out_specs=specs[count:],
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(first, due, *kept, *renewed)


def _grid_spec(mesh: jax.sharding.AbstractMesh, spec: PartitionSpec, blocks: Blocks) -> PartitionSpec:
    """Return the sharding of an array with one entry per block, such that no block is split over devices."""
    stored = state_spec(mesh, spec, blocks.shape, (*blocks.grid_shape, blocks.rows[1], blocks.rows[1]))
    return PartitionSpec(*stored[: len(blocks.grid_shape)])
