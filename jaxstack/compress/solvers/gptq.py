"""GPTQ: rounding to integers that corrects later columns for the error of earlier ones (arXiv:2210.17323)."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxstack.compress.base import Compressed, InputStatistics
from jaxstack.compress.formats.integer_grid import RoundingMethod
from jaxstack.compress.solvers.column_sweep import DAMPING, ColumnSweepMethod, factorize, sweep
from pallas_kernels.weight_only.packed import pack_integers
from pallas_kernels.weight_only.rounding_grid import Grid


class Gptq(ColumnSweepMethod, RoundingMethod):
    """Rounds weights to integers column by column, correcting later columns for each error (GPTQ, arXiv:2210.17323)."""

    method: Literal["gptq"] = "gptq"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        found = gptq(w, self.hessian(statistics), self.grid, self.damping)
        self.warn_unless(found.valid, "rounded to the nearest values")
        return pack_integers(self.grid, found.q, found.scales, round_inputs=self.format.rounds_inputs)


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
