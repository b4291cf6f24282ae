"""GPTQ: rounding to integers that corrects later columns for the error of earlier ones."""

import warnings
from typing import ClassVar, Literal

from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method, Statistic
from jaxstack.compress.methods.rtn import group_reason
from jaxstack.compress.solve import DAMPING, gptq
from pallas_kernels.weight_only.grid import Grid
from pallas_kernels.weight_only.packed import pack_integers


class Gptq(Method):
    """Rounds to a symmetric grid column by column and corrects the columns that follow (arXiv:2210.17323)."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"hessian"})
    method: Literal["gptq"] = "gptq"
    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=128, ge=1)
    """Number of inputs that share a scale; null: one scale for each output."""
    damping: float = Field(default=DAMPING, gt=0)
    """Share of the mean of the Hessian's diagonal that is added to the diagonal."""

    @property
    def grid(self) -> Grid:
        """The grid that the weights are rounded to."""
        return Grid(self.bits, self.group_size)

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_reason(self.group_size, inputs)

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        assert statistics is not None and statistics.hessian is not None
        found = gptq(w, statistics.hessian, self.grid, self.damping)
        if not found.valid:
            warnings.warn(
                f"the Hessian is not positive definite with damping {self.damping}, so the weights were rounded to the "
                "nearest values without corrections; raise damping, or use more calibration text.",
                stacklevel=2,
            )
        return pack_integers(self.grid, found.q, found.scales)
