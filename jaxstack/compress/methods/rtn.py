"""Rounding to nearest: integers with a scale for each output or for each group of inputs."""

from typing import Literal, Self

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.rounding_base import RoundingMethod
from pallas_kernels.weight_only.packed import pack_integers, pack_nearest


class Rtn(RoundingMethod):
    """Rounds each weight to the nearest integer of a symmetric grid. Needs no calibration text."""

    method: Literal["rtn"] = "rtn"
    bits: int = Field(default=8, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=None, ge=1)
    """Number of inputs that share a scale. Default: one scale for each output."""

    scales: Literal["largest", "fitted"] = "largest"
    """largest: from the largest weight of a group. fitted: those with the smallest squared error. Of a run that was
    trained with `method: lsq` on the same grid, these are exactly the learned scales."""

    @model_validator(mode="after")
    def _check_scales(self) -> Self:
        if self.scales == "fitted" and self.rounds_inputs:
            raise ValueError("activations int8 need `scales: largest`.")
        return self

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        if self.scales == "fitted":
            scales = self.grid.fitted_scales(w)
            return pack_integers(self.grid, self.grid.quantize(w, scales), scales.astype(jnp.bfloat16))
        return pack_nearest(self.grid, w, round_inputs=self.rounds_inputs)
