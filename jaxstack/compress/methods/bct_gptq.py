"""BCT with corrections: integers with a power-of-two scale per tile, rounded column by column as GPTQ does."""

import functools
from typing import Literal

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxstack.compress.column_sweep import round_to_scales
from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.bct import Bct, round_tiles
from jaxstack.compress.methods.column_sweep_base import ColumnSweepMethod
from pallas_kernels.weight_only.formats import TileFloatFormat
from pallas_kernels.weight_only.packed import pack_tile_float
from pallas_kernels.weight_only.rounding_grid import Grid


class BctGptq(ColumnSweepMethod, Bct):
    """Rounds to integers with one power-of-two scale per tile as `bct` does, with the error corrections of GPTQ."""

    method: Literal["bct_gptq"] = "bct_gptq"  # type: ignore[assignment]

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        q, exponents, valid = _round(w, self.hessian(statistics), self.bits, self.tile, self.damping)
        self.warn_unless(valid, "rounded to the nearest values")
        return pack_tile_float(self.bits, q, exponents)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _round(
    w: Float[Array, "out in"], hessian: Float[Array, "in in"], bits: int, tile: tuple[int, int], damping: float
) -> tuple[Int[Array, "out in"], Int[Array, "tiles_out tiles_in"], Bool[Array, ""]]:
    """Round a matrix in tiles by GPTQ; return integers, tile exponents, and whether the Hessian could be factorized."""
    _, exponents = round_tiles(w, bits, *tile)
    spread = TileFloatFormat(bits).scales({"q": w, "exponents": exponents})
    q, valid = round_to_scales(w, hessian, Grid(bits), spread, damping)
    return q, exponents, valid
