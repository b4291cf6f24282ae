"""SparseGPT: pruning that corrects later columns for the zeros of earlier ones (arXiv:2301.00774)."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxstack.compress.base import Compressed, InputStatistics
from jaxstack.compress.formats.sparse import Pattern, PruningMethod
from jaxstack.compress.solvers.column_sweep import BLOCK, DAMPING, ColumnSweepMethod, factorize, sweep


class SparseGpt(ColumnSweepMethod, PruningMethod):
    """Prunes a matrix in blocks of columns, correcting later columns for each error (SparseGPT, arXiv:2301.00774)."""

    method: Literal["sparsegpt"] = "sparsegpt"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        found = sparsegpt(w, self.hessian(statistics), self.format, self.damping)
        self.warn_unless(found.valid, "pruned by magnitude")
        return self.format.stored(found.w)


class Solution(NamedTuple):
    """The weights of a matrix after pruning or rounding with error compensation."""

    w: Float[Array, "out in"]
    """The new weights, float32."""
    valid: Bool[Array, ""]
    """See `Factor.valid`."""


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
    if reason := pattern.unsupported_reason(*w.shape):
        raise ValueError(f"{reason}.")
    factor = factorize(hessian, damping)
    w = jnp.where(factor.dead, 0.0, w.astype(jnp.float32))
    size = 1 if pattern.keep_of is None else pattern.keep_of[1]
    columns = BLOCK // size * size or size  # no group of an n:m pattern is cut
    return Solution(sweep(w, factor.upper, Prune(pattern), None, columns), factor.valid)


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
