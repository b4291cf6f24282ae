"""Column sweep that prunes or rounds a matrix and corrects the remaining columns for the error (SparseGPT, GPTQ).

For a layer y = W x with W [out, in], removing an error in column i of W changes the columns after it so that the
layer's output over the calibration inputs changes least (optimal brain surgeon; Frantar & Alistarh 2022,
arXiv:2208.11580). With the Hessian H = (2/n) sum x x^T of one output and the upper triangular U, H^-1 = U^T U:

    e = (w_i - q_i) / U_ii
    W[:, i:] -= e U[i, i:]

SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774) sets q to 0 or w, GPTQ (Frantar et al. 2022, arXiv:2210.17323) to
the nearest value of a grid. Columns are treated in blocks of 128; columns after the block are corrected once, by a
matmul.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxstack.compress.prune import Pattern
from pallas_kernels.weight_only.rounding_grid import Grid

BLOCK = 128
"""Columns of a block; also the columns over which SparseGPT compares weights."""
DAMPING = 0.01
"""Default share of the mean of H's diagonal that is added to it."""

State: TypeAlias = Any
"""Tree of arrays that a rule computes for the columns of a block."""


class Rule(Protocol):
    """Interface of a rule that prunes or rounds the columns of a matrix; hashable, to be a static argument of `jit`."""

    def start_block(
        self, data: Any, w: Float[Array, "out block"], diagonal: Float[Array, " block"], start: Int[Array, ""] | int
    ) -> State:
        """Prepare to prune or round one block of columns with current weights w; return the rule's state for it."""
        ...

    def column(
        self, state: State, w: Float[Array, "out block"], diagonal: Float[Array, " block"], i: Int[Array, ""] | int
    ) -> tuple[Float[Array, " out"], State]:
        """Return the new values of column i of the block, and the rule's state for the next column."""
        ...


class Factor(NamedTuple):
    """Upper triangular factor of the inverse of a damped Hessian, and whether the factorization succeeded."""

    upper: Float[Array, "in in"]
    """Upper triangular U with H^-1 = U^T U; the identity where the factorization failed."""
    dead: Bool[Array, " in"]
    """Inputs that are always zero: their weights have no effect."""
    valid: Bool[Array, ""]
    """False if H was not positive definite in float32. A sweep with the identity corrects nothing: GPTQ is then plain
    rounding, and SparseGPT prunes by magnitude."""


class Solution(NamedTuple):
    """The weights of a matrix after pruning or rounding with error compensation."""

    w: Float[Array, "out in"]
    """The new weights, float32."""
    valid: Bool[Array, ""]
    """See `Factor.valid`."""


def factorize(hessian: Float[Array, "in in"], damping: float = DAMPING) -> Factor:
    """Return the upper triangular U with U^T U = inverse of H + damping * mean(diag(H)) * I.

    With the order of rows and columns reversed, the Cholesky factor of H is upper triangular, H = R R^T, and U = R^-1.
    The inverse of H is never formed.

    Args:
      hessian: (2/n) sum of x x^T over the inputs x, float32.
      damping: share of the mean diagonal that is added to the diagonal.
    """
    diagonal = jnp.diagonal(hessian)
    dead = diagonal <= 0
    identity = jnp.eye(len(diagonal), dtype=jnp.float32)
    damped = hessian + identity * (jnp.where(dead, 1.0, 0.0) + damping * jnp.mean(jnp.where(dead, 1.0, diagonal)))
    lower = jax.lax.linalg.cholesky(damped[::-1, ::-1])
    inverse = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    upper = inverse[::-1, ::-1]
    valid = jnp.isfinite(upper).all()
    return Factor(jnp.where(valid, upper, identity), dead, valid)


def sweep(
    w: Float[Array, "out in"], upper: Float[Array, "in in"], rule: Rule, data: Any, columns: int = BLOCK
) -> Float[Array, "out in"]:
    """Prune or round a matrix column by column by `rule`, first correcting each column for the errors of earlier ones.

    The rows of w may be sharded: a row depends on others only where the rule compares rows.

    Args:
      w: weights, float32.
      upper: `Factor.upper`, in the order of w's columns.
      rule: chooses the values.
      data: what the rule reads in addition, such as scales.
      columns: number of columns of a block.
    """
    inputs = w.shape[1]

    def block(start: jax.Array | int, w: jax.Array, size: int) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(upper, start, size, axis=0)
        inner = jax.lax.dynamic_slice_in_dim(rows, start, size, axis=1)
        before = jax.lax.dynamic_slice_in_dim(w, start, size, axis=1)
        after, errors = _sweep_block(before, inner, rule, rule.start_block(data, before, jnp.diagonal(inner), start))
        # Rows of U are zero before the block, so that only the block itself and what follows it changes.
        w = w - jnp.matmul(errors, rows, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(w, after, start, axis=1)

    whole = inputs // columns
    if whole:
        w = jax.lax.fori_loop(0, whole, lambda i, w: block(i * columns, w, columns), w)
    return w if whole * columns == inputs else block(whole * columns, w, inputs - whole * columns)


def _sweep_block(
    w: Float[Array, "out block"], upper: Float[Array, "block block"], rule: Rule, state: State
) -> tuple[Float[Array, "out block"], Float[Array, "out block"]]:
    """Prune or round the columns of a block; return the new weights, and the errors that later columns correct."""
    diagonal = jnp.diagonal(upper)
    columns = jnp.arange(w.shape[1])

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, State]) -> tuple[jax.Array, jax.Array, State]:
        w, errors, state = carry
        old = jax.lax.dynamic_index_in_dim(w, i, axis=1, keepdims=False)
        new, state = rule.column(state, w, diagonal, i)
        error = (old - new) / diagonal[i]
        is_column = columns == i
        w = jnp.where(is_column, new[:, None], w - error[:, None] * upper[i])
        return w, jnp.where(is_column, error[:, None], errors), state

    w, errors, _ = jax.lax.fori_loop(0, w.shape[1], step, (w, jnp.zeros_like(w), state))
    return w, errors


@dataclasses.dataclass(frozen=True)
class Prune:
    """SparseGPT's rule: prunes the weights whose w^2 / U_ii^2, the error that a zero causes, is smallest.

    Attributes:
      pattern: share of zeros, chosen in each block over all rows; or n:m, chosen at every m-th column.
    """

    pattern: Pattern

    def start_block(
        self, data: None, w: Float[Array, "out block"], diagonal: Float[Array, " block"], start: Int[Array, ""] | int
    ) -> Bool[Array, "out block"]:
        """Return the mask of the weights to prune in a block of columns; n:m patterns start with all False.

        For them `column` chooses the weights, at the first column of each group.
        """
        if self.pattern.keep_of is not None:
            return jnp.zeros(w.shape, bool)
        return self.pattern.zeros(jnp.square(w / diagonal))

    def column(
        self,
        state: Bool[Array, "out block"],
        w: Float[Array, "out block"],
        diagonal: Float[Array, " block"],
        i: Int[Array, ""] | int,
    ) -> tuple[Float[Array, " out"], Bool[Array, "out block"]]:
        """Return column i after pruning, and the mask; n:m patterns set a group's mask at the group's first column."""
        if self.pattern.keep_of is not None:
            size = self.pattern.keep_of[1]

            def choose(mask: jax.Array) -> jax.Array:
                group = jax.lax.dynamic_slice_in_dim(w, i, size, axis=1)
                scores = jnp.square(group / jax.lax.dynamic_slice_in_dim(diagonal, i, size))
                return jax.lax.dynamic_update_slice_in_dim(mask, self.pattern.zeros(scores), i, axis=1)

            state = jax.lax.cond(i % size == 0, choose, lambda mask: mask, state)
        old, zero = (jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in (w, state))
        return jnp.where(zero, 0.0, old), state


@dataclasses.dataclass(frozen=True)
class Round:
    """GPTQ's rule: rounds each weight to the nearest value of an integer grid with given scales [out, in]."""

    grid: Grid

    def start_block(
        self,
        data: Float[Array, "out in"],
        w: Float[Array, "out block"],
        diagonal: Float[Array, " block"],
        start: Int[Array, ""] | int,
    ) -> Float[Array, "out block"]:
        """Return the scales of the weights in the block's columns, which are the rule's state."""
        return jax.lax.dynamic_slice_in_dim(data, start, w.shape[1], axis=1)

    def column(
        self,
        state: Float[Array, "out block"],
        w: Float[Array, "out block"],
        diagonal: Float[Array, " block"],
        i: Int[Array, ""] | int,
    ) -> tuple[Float[Array, " out"], Float[Array, "out block"]]:
        """Return column i rounded to the grid, and the block's scales as given, since rounding does not change them."""
        old, scale = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (w, state))
        return self.grid.dequantize(self.grid.quantize(old, scale), scale)[:, 0], state


@functools.partial(jax.jit, static_argnames=("pattern", "damping"))
def sparsegpt(
    w: Float[Array, "out in"], hessian: Float[Array, "in in"], pattern: Pattern, damping: float = DAMPING
) -> Solution:
    """Prune a matrix by SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774).

    Args:
      w: weights.
      hessian: (2/n) sum of x x^T over the layer's inputs, float32.
      pattern: share of zeros, or n:m.
      damping: see `factorize`.
    """
    pattern.check(w.shape[1])
    factor = factorize(hessian, damping)
    w = jnp.where(factor.dead, 0.0, w.astype(jnp.float32))
    size = 1 if pattern.keep_of is None else pattern.keep_of[1]
    columns = BLOCK // size * size or size  # no group of an n:m pattern is cut
    return Solution(sweep(w, factor.upper, Prune(pattern), None, columns), factor.valid)


class Rounded(NamedTuple):
    """A matrix on a grid of integers, w = q * scale."""

    q: Int[Array, "out in"]
    """The integers, int8."""
    scales: Float[Array, "out groups"]
    """Scales of the groups, bfloat16."""
    valid: Bool[Array, ""]
    """See `Factor.valid`."""


@functools.partial(jax.jit, static_argnames=("grid", "damping"))
def gptq(w: Float[Array, "out in"], hessian: Float[Array, "in in"], grid: Grid, damping: float = DAMPING) -> Rounded:
    """Round a matrix to an integer grid by GPTQ (Frantar et al. 2022, arXiv:2210.17323).

    Columns are rounded in descending order of H's diagonal, with the scales of the groups in the original order
    ("static groups"), so that the result is stored without a permutation. The scales are rounded to bfloat16 before the
    weights are, so that their rounding adds no error.

    Args:
      w: weights.
      hessian: (2/n) sum of x x^T over the layer's inputs, float32.
      grid: the integers and the size of a group.
      damping: see `factorize`.
    """
    w = jnp.where(jnp.diagonal(hessian) <= 0, 0.0, w.astype(jnp.float32))
    scales = grid.scales(w)
    spread = jnp.repeat(scales, w.shape[1] // scales.shape[1], axis=1)
    q, valid = round_to_scales(w, hessian, grid, spread, damping)
    return Rounded(q, scales.astype(jnp.bfloat16), valid)


def round_to_scales(
    w: Float[Array, "out in"],
    hessian: Float[Array, "in in"],
    grid: Grid,
    spread: Float[Array, "out in"],
    damping: float = DAMPING,
) -> tuple[Int[Array, "out in"], Bool[Array, ""]]:
    """Round a matrix by GPTQ with given scales; return int8 integers, and whether the Hessian could be factorized."""
    order = jnp.argsort(-jnp.diagonal(hessian))
    factor = factorize(hessian[order][:, order], damping)
    ordered = jnp.where(factor.dead, 0.0, w.astype(jnp.float32)[:, order])
    rounded = sweep(ordered, factor.upper, Round(Grid(grid.bits)), spread[:, order])
    rounded = jnp.zeros(w.shape, jnp.float32).at[:, order].set(rounded)
    return Grid(grid.bits).quantize(rounded, spread), factor.valid
