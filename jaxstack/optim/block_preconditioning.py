"""Base class of optimizers that precondition each matrix in blocks (Shampoo, SOAP)."""

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree
from pydantic import Field

from jaxstack.optim.base import MatrixOptimizer, RunInfo
from jaxstack.parallel.rules import state_spec
from jaxstack.parameter_paths import map_by_path


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
        m, rows = self.rows
        n, columns = self.columns
        height, width = self.matrix_shape
        x = x.reshape(*self.batch_dims, height, width)
        if (m * rows, n * columns) != (height, width):
            x = jnp.pad(x, [(0, 0)] * len(self.batch_dims) + [(0, m * rows - height), (0, n * columns - width)])
        x = jnp.moveaxis(x.reshape(*self.batch_dims, m, rows, n, columns), -3, -2)
        return x.reshape(*self.grid_shape, rows, columns)

    def join(self, blocks: Float[Array, "..."]) -> Float[Array, "..."]:
        """Put blocks back together into an array of the parameter's shape: the inverse of `split`."""
        m, rows = self.rows
        n, columns = self.columns
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
      inputs, outputs: as in `MatrixShapeRule`.
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


exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
"""`jnp.einsum` in full float32 on every device, which decompositions of the result need."""


class BlockOptimizer(MatrixOptimizer):
    """Base configuration of optimizers that cut matrices into blocks, each with a left and a right preconditioner.

    The factors of a block with the gradient G are moving averages of G G^T and G^T G. A subclass derives a matrix from
    each factor (a root or a basis), recomputed every `refresh_every` steps on the device that stores the block.
    It declares its state in `init_state` and its step in `update_parameter`.
    """

    factor_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the factors, which are moving averages."""
    block_size: int = Field(default=1024, ge=1)
    """Largest number of rows and columns of a block. A block is best a divisor of a device's part of each matrix."""
    refresh_every: int = Field(default=10, ge=1)
    """Steps between two refreshes of what is computed from a block's factors; blocks take turns."""

    @abstractmethod
    def init_state(self, params: PyTree) -> Any:
        """Return the initial optimizer state: a NamedTuple of the step count, then trees shaped like `params`."""

    @abstractmethod
    def update_parameter(
        self,
        run: RunInfo,
        count: Int[Array, ""],
        path: str,
        gradient: Float[Array, "..."],
        *state: Float[Array, "..."],
    ) -> tuple[jax.Array, ...]:
        """Return the update direction of one parameter, followed by its new optimizer state.

        Args:
          run: the layout, among others.
          count: number of earlier steps.
          path: path of the parameter.
          gradient: its gradient.
          state: the parameter's leaf of each tree of the state.
        """

    def matrix_core(self, run: RunInfo) -> optax.GradientTransformation:
        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
            one = functools.partial(self.update_parameter, run, state.steps)
            results = map_by_path(one, updates, *state[1:])

            def pick(index):
                return jax.tree.map(lambda _, result: result[index], updates, results)

            return pick(0), type(state)(state.steps + 1, *(pick(index) for index in range(1, len(state))))

        return optax.GradientTransformation(self.init_state, update)

    def blocks(self, path: str, shape: tuple[int, ...]) -> Blocks:
        """Return how the parameter at this path is cut into blocks, each with its own preconditioner."""
        rule = self.rule(path)
        return choose_blocks(shape, rule.inputs, rule.outputs, self.block_size)

    def zeros_by_block(self, params: PyTree, shape: Callable[[int, int], tuple[int, ...]]) -> PyTree:
        """Create zero-initialized state of each parameter's blocks: an array [*grid_shape, *shape(rows, columns)]."""

        def zeros(path: str, parameter: jax.Array) -> jax.Array:
            blocks = self.blocks(path, parameter.shape)
            return jnp.zeros((*blocks.grid_shape, *shape(blocks.rows[1], blocks.columns[1])), jnp.float32)

        return map_by_path(zeros, params)

    def zero_factors(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return zero-initialized left and right gradient statistics for each block of each parameter.

        The left ones have the shape [*grid_shape, rows, rows], the right ones [*grid_shape, columns, columns].
        """
        left = self.zeros_by_block(params, lambda rows, columns: (rows, rows))
        return left, self.zeros_by_block(params, lambda rows, columns: (columns, columns))

    def average_factors(
        self, left: Float[Array, "*grid m m"], right: Float[Array, "*grid n n"], gradient: Float[Array, "*grid m n"]
    ) -> tuple[Float[Array, "*grid m m"], Float[Array, "*grid n n"]]:
        """Update the moving averages of G G^T (left) and G^T G (right) with the gradient G of each block."""
        new_left = exact_einsum("...ij,...kj->...ik", gradient, gradient)
        new_right = exact_einsum("...ji,...jk->...ik", gradient, gradient)
        decay = self.factor_decay
        return decay * left + (1 - decay) * new_left, decay * right + (1 - decay) * new_right

    def refresh(
        self,
        run: RunInfo,
        count: Int[Array, ""],
        path: str,
        blocks: Blocks,
        factors: tuple[jax.Array, jax.Array],
        derived: tuple[jax.Array, jax.Array],
        start: Refresh,
        renew: Refresh,
    ) -> tuple[jax.Array, ...]:
        """Recompute preconditioners (such as inverse roots) from gradient statistics, for blocks due at this step.

        Args:
          run, count, path: as in `update_parameter`.
          blocks: the blocks of the parameter.
          factors: left and right factors.
          derived: what was computed from them at the last refresh.
          start: function of one block's (left, right, *derived) that computes `derived` at the first step.
          renew: the same at later steps.
        """
        due = blocks.needs_refresh(path, count, self.refresh_every)
        return refresh(count == 0, due, start, renew, factors, derived, blocks, run.specs.get(path))
