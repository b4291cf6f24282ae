"""Rounding to nearest: integers with a scale for each output or for each group of inputs."""

from typing import Literal

from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.rounding_base import RoundingMethod
from pallas_kernels.weight_only.packed import pack_nearest


class Rtn(RoundingMethod):
    """Rounds each weight to the nearest integer of a symmetric grid. Needs no calibration text."""

    method: Literal["rtn"] = "rtn"
    bits: int = Field(default=8, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=None, ge=1)
    """Number of inputs that share a scale. Default: one scale for each output."""

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        return pack_nearest(self.grid, w, round_inputs=self.rounds_inputs)
