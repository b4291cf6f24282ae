"""Quantization-aware training: the forward pass computes with weights rounded to the grid of the export.

The gradient of the rounded weight is applied to the float32 weight unchanged (the straight-through estimator, Bengio
et al. 2013, arXiv:1308.3432). With `activations: int8` inputs are rounded too, and products are those of integers. With
`scales: learned` the scales are trained as well (LSQ, Esser et al. 2020, arXiv:1902.08153).
"""

from typing import Any, Literal, Self, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from jaxstack.compressed_training.base import Stored, WeightRule
from jaxstack.compressed_training.compressible_weights import MatrixLayout, Weight
from jaxstack.errors import ConfigError
from jaxstack.parallel.rules import KEEP_FLOAT32
from pallas_kernels.weight_only.formats import RoundedInputFormat
from pallas_kernels.weight_only.integer_products import int8_dot_general, unsupported_inputs
from pallas_kernels.weight_only.packed import PackedWeight, pack_integers, pack_nearest
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

    scales: Literal["largest", "learned"] = "largest"
    """largest: each step computes the scale of a group from its largest weight. learned: scales are parameters that are
    trained with the weights. They start where the squared error of rounding is smallest, so that training starts
    exactly at the values of a model that GPTQ has rounded to the same grid."""

    activations: Literal["int8"] | None = None
    """int8: the inputs of the layers are rounded too, to int8 with a scale for each token, and multiplied as integers
    (W8A8). For dense layers, with `bits: 8` and `group_size: null`. null: inputs are not rounded."""

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        if self.activations is not None:
            RoundedInputFormat(self.grid)
            if self.learns_scales:
                raise ValueError("activations int8 need `scales: largest`.")
        return self

    @property
    def learns_scales(self) -> bool:
        """True if the scales are parameters."""
        return self.scales == "learned"

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    @property
    def title(self) -> str:
        group = "one scale an output" if self.group_size is None else f"groups of {self.group_size}"
        learned = ", learned scales" if self.learns_scales else ""
        return f"quantized to int{self.bits} ({group}{learned})" + (", inputs to int8" if self.activations else "")

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
        if self.learns_scales:
            return round_with_scales(w, self.grid.fitted_scales(w), self.grid)
        return round_straight_through(w, self.grid) if train else self.grid.round(w)

    def stored_parts(self, layout: MatrixLayout) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] | None:
        if not self.learns_scales:
            return None
        (outputs, inputs), stack = layout.size, layout.stack_shape
        stacked, of_outputs, of_inputs = layout.matrix_axes
        return {
            "weight": ((*stack, outputs, inputs), (*stacked, of_outputs, of_inputs)),
            "scale": ((*stack, outputs, self.grid.groups(inputs)), (*stacked, of_outputs, None)),
        }

    def store(self, w: jax.Array, layout: MatrixLayout) -> Stored:
        if not self.learns_scales:
            return w
        matrices = layout.to_matrices(w)
        return {"weight": matrices, "scale": self.grid.fitted_scales(matrices)}

    def use(self, stored: Stored, layout: MatrixLayout, choice: Int[Array, "*stack"] | None) -> jax.Array:
        if not self.learns_scales:
            return super().use(stored, layout, choice)
        return layout.from_matrices(round_with_scales(stored["weight"], stored["scale"], self.grid))

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        return self.use(stored, layout, None) if self.learns_scales else super().export(stored, layout)

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the dense weight; with learned scales the rounded one, because it has no place for the scales."""
        return self.export(stored, layout) if self.learns_scales else stored

    def keep(self, old: Stored, new: Stored) -> Stored:
        """Limit what an optimizer step changes: it at most halves a scale, so that scales stay positive."""
        return {**new, "scale": jnp.maximum(new["scale"], old["scale"] / 2)} if self.learns_scales else new

    def pack(self, stored: Stored) -> PackedWeight:
        if self.learns_scales:
            scales = stored["scale"].astype(jnp.bfloat16)
            q = self.grid.quantize(stored["weight"], scales.astype(jnp.float32))
            return pack_integers(self.grid, q, scales)
        return pack_nearest(self.grid, stored, round_inputs=self.activations is not None)

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        return super().kept(stored["weight"] if self.learns_scales else stored, layout)


def round_straight_through(w: Float[Array, "out in"], grid: Grid) -> Float[Array, "out in"]:
    """Round weights to an integer grid; the gradient passes to w unchanged (straight-through estimator)."""
    return _straight_through(w, grid.round(jax.lax.stop_gradient(w)))


def round_with_scales(
    w: Float[Array, "*stack out in"], scales: Float[Array, "*stack out groups"], grid: Grid
) -> Float[Array, "*stack out in"]:
    """Round weights to an integer grid with given scales; differentiable in both (LSQ, arXiv:1902.08153).

    The gradient passes the rounding of weights to integers and of scales to bfloat16 unchanged. It does not pass
    clipping: that of a clipped weight is 0. Where a scale is 0, as in the rows that pad a pipeline's stages, so are the
    weights.
    """
    scales = _straight_through(scales, scales.astype(jnp.bfloat16).astype(jnp.float32))[..., None]
    steps = jnp.clip(w.reshape(*scales.shape[:-1], -1) / jnp.where(scales == 0, 1, scales), *grid.limits)
    return (_straight_through(steps, jnp.round(steps)) * scales).reshape(w.shape)


def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return `rounded` with the gradient of x."""
    fixed = jax.lax.stop_gradient(x)
    return jax.lax.stop_gradient(rounded) + (x - fixed)  # the difference is exactly zero
