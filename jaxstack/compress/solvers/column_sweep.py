"""Column sweep that prunes or rounds a matrix and corrects the remaining columns for the error (SparseGPT, GPTQ).

For a layer y = W x with W [out, in], removing an error in column i of W changes the columns after it so that the
layer's output over the calibration inputs changes least (optimal brain surgeon; Frantar & Alistarh 2022,
arXiv:2208.11580). With the Hessian H = (2/n) sum x x^T of one output and the upper triangular U, H^-1 = U^T U:

    e = (w_i - q_i) / U_ii
    W[:, i:] -= e U[i, i:]

What q is, a rule says: `sparsegpt` sets it to 0 or w, `gptq` to the nearest value of a grid. Columns are treated in
blocks of 128; columns after the block are corrected once, by a matmul.
"""

import warnings
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from jaxstack.compress.base import AfterTraining, InputStatistics, Statistic
from pallas_kernels.target import current_target

BLOCK = 128
"""Columns of a block; also the columns over which a rule may compare weights."""
GPU_COLUMNS = 4
"""Columns per iteration on GPUs, where XLA makes two kernels of an iteration with one column or four: the time is that
of starting them. CPUs take longer with more than one. The results are the same."""
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
    """False if H was not positive definite in float32. A sweep with the identity corrects nothing: it is then plain
    rounding, or pruning by magnitude."""


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

    unroll = GPU_COLUMNS if current_target().platform == "cuda" else 1
    w, errors, _ = jax.lax.fori_loop(0, w.shape[1], step, (w, jnp.zeros_like(w), state), unroll=unroll)
    return w, errors


class ColumnSweepMethod(AfterTraining):
    """Base of methods that compress column by column, with corrections from the Hessian of a layer's inputs."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"hessian"})
    damping: float = Field(default=DAMPING, gt=0)
    """Share of the mean of the Hessian's diagonal that is added to the diagonal."""

    @staticmethod
    def hessian(statistics: InputStatistics | None) -> Float[Array, "in in"]:
        """Return the Hessian of a layer's inputs from the statistics that calibration measured."""
        assert statistics is not None and statistics.hessian is not None
        return statistics.hessian

    def warn_unless(self, valid: Bool[Array, ""], fallback: str) -> None:
        """Warn, unless `valid`, that the Hessian could not be factorized, and say what was done instead.

        Args:
          valid: `Factor.valid`.
          fallback: what was done with the weights, such as `rounded to the nearest values`.
        """
        if not valid:
            warnings.warn(
                f"the Hessian is not positive definite with damping {self.damping}, so the weights were {fallback} "
                "without corrections; raise damping, or use more calibration text.",
                stacklevel=3,
            )
