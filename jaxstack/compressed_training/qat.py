"""Quantization-aware training: the forward pass computes with weights rounded to the grid of the export.

The gradient of the rounded weight is applied to the float32 weight unchanged (the straight-through estimator, Bengio
et al. 2013, arXiv:1308.3432).
"""

from typing import Literal

import jax
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compressed_training.base import Stored, WeightRule
from jaxstack.compressed_training.compressible_weights import Weight
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.packed import PackedWeight, pack_nearest
from pallas_kernels.weight_only.rounding_grid import Grid


class QatRule(WeightRule):
    """Trains with weights rounded to symmetric integers, with one scale for each group of inputs.

    `jaxstack compress` with the method `rtn` rounds alike.
    """

    method: Literal["qat"] = "qat"
    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=128, ge=1)
    """Number of inputs that share a scale; null: one scale for each output."""

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    @property
    def title(self) -> str:
        group = "one scale an output" if self.group_size is None else f"groups of {self.group_size}"
        return f"quantized to int{self.bits} ({group})"

    def check(self, weight: Weight) -> None:
        try:
            self.grid.groups(weight.layout.size[1])
        except ValueError as error:
            raise ConfigError(f"compression.rules: {weight.names[0]}: {error}") from None

    def compress(self, w: Float[Array, "out in"], *, train: bool) -> Float[Array, "out in"]:
        return round_straight_through(w, self.grid) if train else self.grid.round(w)

    def pack(self, stored: Stored) -> PackedWeight:
        return pack_nearest(self.grid, stored)


def round_straight_through(w: Float[Array, "out in"], grid: Grid) -> Float[Array, "out in"]:
    """Round weights to an integer grid; the gradient passes to w unchanged (straight-through estimator)."""
    fixed = jax.lax.stop_gradient(w)
    return grid.round(fixed) + (w - fixed)  # the difference is exactly zero
