"""Base class of optimizers that precondition each matrix in blocks (Shampoo, SOAP)."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from pydantic import Field

from jaxstack.optim.base import RunInfo
from jaxstack.optim.blocks import Blocks, Refresh, choose_blocks, refresh
from jaxstack.optim.matrix_optimizer import MatrixOptimizer
from jaxstack.tree_rules import map_by_path

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
          run, count, path: as of `update_parameter`.
          blocks: the blocks of the parameter.
          factors: left and right factors.
          derived: what was computed from them at the last refresh.
          start: function of one block's (left, right, *derived) that computes `derived` at the first step.
          renew: the same at later steps.
        """
        due = blocks.needs_refresh(path, count, self.refresh_every)
        return refresh(count == 0, due, start, renew, factors, derived, blocks, run.specs.get(path))
