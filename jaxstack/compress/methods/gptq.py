"""GPTQ: rounding to integers that corrects later columns for the error of earlier ones."""

from typing import Literal

from jaxtyping import Array, Float

from jaxstack.compress.column_sweep import gptq
from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.column_sweep_base import ColumnSweepMethod
from jaxstack.compress.methods.rounding_base import RoundingMethod
from pallas_kernels.weight_only.packed import pack_integers


class Gptq(ColumnSweepMethod, RoundingMethod):
    """Rounds weights to integers column by column, correcting later columns for each error (GPTQ, arXiv:2210.17323)."""

    method: Literal["gptq"] = "gptq"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        found = gptq(w, self.hessian(statistics), self.grid, self.damping)
        self.warn_unless(found.valid, "rounded to the nearest values")
        return pack_integers(self.grid, found.q, found.scales, round_inputs=self.rounds_inputs)
