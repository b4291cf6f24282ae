"""Quantization-aware training: the forward pass computes with weights rounded to the grid of the export.

The gradient of the rounded weight is applied to the float32 weight unchanged (the straight-through estimator, Bengio
et al. 2013, arXiv:1308.3432). With `activations: int8` inputs are rounded too, and products are those of integers.
"""

from typing import Any, Literal, Self, cast

import jax
from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jaxstack.compressed_training.base import Stored, WeightRule
from jaxstack.compressed_training.compressible_weights import Weight
from jaxstack.errors import ConfigError
from jaxstack.parallel.rules import KEEP_FLOAT32
from pallas_kernels.weight_only.formats import RoundedInputFormat
from pallas_kernels.weight_only.integer_products import int8_dot_general, unsupported_inputs
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

    activations: Literal["int8"] | None = None
    """int8: the inputs of the layers are rounded too, to int8 with a scale for each token, and multiplied as integers
    (W8A8). For dense layers, with `bits: 8` and `group_size: null`. null: inputs are not rounded."""

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        if self.activations is not None:
            RoundedInputFormat(self.grid)
        return self

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    @property
    def title(self) -> str:
        group = "one scale an output" if self.group_size is None else f"groups of {self.group_size}"
        return f"quantized to int{self.bits} ({group})" + (", inputs to int8" if self.activations else "")

    def check(self, weight: Weight) -> None:
        try:
            self.grid.groups(weight.layout.size[1])
        except ValueError as error:
            raise ConfigError(f"compression.rules: {weight.names[0]}: {error}") from None
        if self.activations and (reason := unsupported_inputs(weight.layout.size[1])):
            raise ConfigError(f"compression.rules: {weight.names[0]}: {reason}; drop `activations`.")

    @property
    def replaces_matmul(self) -> bool:
        return self.activations is not None

    def replace_matmul(self, layer: nnx.Module, weight: Weight) -> None:
        if self.activations is None:
            return
        dense = cast(Any, layer)
        if not weight.path.endswith("kernel") or not hasattr(dense, "dot_general"):
            raise ConfigError(
                f"compression.rules: {self.path!r} with activations int8 matches {weight.names[0]}, which is no dense "
                "layer; give embedding, head and experts a rule of their own, without activations, before it."
            )
        if dense.dot_general is not jax.lax.dot_general:
            raise ConfigError(
                f"compression.rules: {weight.names[0]} has another matmul already, such as that of precision.fp8; "
                "set precision.fp8=none, or drop `activations`."
            )
        dense.dot_general = int8_dot_general
        # The values of the grid need more bits than bfloat16 has.
        dense.kernel = dense.kernel.copy(**{KEEP_FLOAT32: True})

    def compress(self, w: Float[Array, "out in"], *, train: bool) -> Float[Array, "out in"]:
        return round_straight_through(w, self.grid) if train else self.grid.round(w)

    def pack(self, stored: Stored) -> PackedWeight:
        return pack_nearest(self.grid, stored, round_inputs=self.activations is not None)


def round_straight_through(w: Float[Array, "out in"], grid: Grid) -> Float[Array, "out in"]:
    """Round weights to an integer grid; the gradient passes to w unchanged (straight-through estimator)."""
    fixed = jax.lax.stop_gradient(w)
    return grid.round(fixed) + (w - fixed)  # the difference is exactly zero
