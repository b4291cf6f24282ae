"""Integers with one scale for each group of inputs, by rounding to nearest: after training (rtn), during it (qat).

Quantization-aware training computes with weights on the grid of the export. The gradient of the rounded weight is
applied to the float32 weight unchanged. With `activations: int8` inputs are rounded too, and products are those of
integers.
"""

import dataclasses
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jaxstack.compress.base import AfterTraining, DuringTraining, Format, Method, training_feature
from jaxstack.compress.matrix import Weight
from jaxstack.config.features import Excludes, Feature, Remark
from jaxstack.errors import ConfigError
from jaxstack.parallel.rules import KEEP_FLOAT32
from pallas_kernels.weight_only.formats import RoundedInputFormat
from pallas_kernels.weight_only.integer_products import int8_dot_general, unsupported_inputs
from pallas_kernels.weight_only.packed import PackedWeight, pack_integers, pack_nearest
from pallas_kernels.weight_only.rounding_grid import Grid


@dataclasses.dataclass(frozen=True)
class IntegerGrid(Format):
    """Integers of a symmetric grid, with a scale for each output or each group of inputs.

    Attributes:
      grid: bits of an integer, and number of inputs that share a scale.
      rounds_inputs: True if the layers also round their inputs to int8 (W8A8).
      fitted: True takes scales with the smallest squared error, False those of the largest weights.
    """

    grid: Grid
    rounds_inputs: bool = False
    fitted: bool = False

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        problem = unsupported_inputs(inputs) if self.rounds_inputs else None
        return problem or group_size_problem(self.grid.group_size, inputs)

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        if not self.fitted:
            return pack_nearest(self.grid, w, round_inputs=self.rounds_inputs)
        scales = self.grid.fitted_scales(w)
        return pack_integers(self.grid, self.grid.quantize(w, scales), scales.astype(jnp.bfloat16))

    def round(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        return super().round(w) if self.fitted else self.grid.round(w)


def group_size_problem(group_size: int | None, inputs: int, name: str = "group_size") -> str | None:
    """Return why groups of `group_size` do not divide a row of `inputs` weights, or None if they do."""
    if group_size is None or inputs % group_size == 0:
        return None
    fitting = max(size for size in range(1, group_size + 1) if inputs % size == 0)
    return f"{name} {group_size} does not divide its {inputs} inputs; the nearest that does is {fitting}"


class IntegerMethod(Method):
    """Base of methods that round weights to integers, with a scale for each output or for each group of inputs."""

    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=128, ge=1)
    """Number of inputs that share a scale; null: one scale for each output."""

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    @property
    def format(self) -> IntegerGrid:
        return IntegerGrid(self.grid)


class RoundingMethod(IntegerMethod):
    """Base of methods whose layers may round their inputs as well as their weights."""

    activations: Literal["int8"] | None = None
    """int8: the layers also round their inputs, to int8 with a scale for each token, and multiply integers (W8A8); with
    `bits: 8` and `group_size: null`, and in training for dense layers only. null: inputs are not rounded."""

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        if self.activations is not None:
            RoundedInputFormat(self.grid)
        return self

    @property
    def rounds_inputs(self) -> bool:
        """True if dense layers that the method compresses round their inputs as well."""
        return self.activations is not None

    @property
    def format(self) -> IntegerGrid:
        return IntegerGrid(self.grid, rounds_inputs=self.rounds_inputs)


class Rtn(RoundingMethod, AfterTraining):
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
        if self.scales == "fitted" and self.activations is not None:
            raise ValueError("activations int8 need `scales: largest`.")
        return self

    @property
    def format(self) -> IntegerGrid:
        return dataclasses.replace(super().format, fitted=self.scales == "fitted")


class TrainedIntegers(IntegerMethod, DuringTraining):
    """Base of methods that train weights which are rounded to integers."""

    def check(self, weight: Weight) -> None:
        try:
            self.grid.groups(weight.layout.size[1])
        except ValueError as error:
            raise ConfigError(f"compression.rules: {weight.names[0]}: {error}") from None


class QatRule(RoundingMethod, TrainedIntegers):
    """Trains with weights rounded to symmetric integers, with one scale for each group of inputs.

    `jaxstack compress` with the method `rtn` rounds in the same way.
    """

    features: ClassVar[tuple[Feature, ...]] = (
        training_feature("quantization-aware training", "qat", "group_size: 8"),
        Feature(
            "int8 activations",
            "compression",
            lambda compression: any(rule.replaces_matmul for rule in compression.rules),
            ("compression.rules=[{path: q_proj, method: qat, bits: 8, group_size: null, activations: int8}]",),
            excludes=(
                Excludes(
                    "pipeline",
                    "stages call the matmuls of stacked layers, which the rule does not replace",
                    "compression.rules with activations do not support a pipeline, and parallel.pipeline is "
                    "{parallel.pipeline}; set it to 1, or remove `activations`.",
                ),
            ),
            remarks=(
                Remark(
                    "mixture of experts", "for the dense layers only, as experts have grouped matmuls", slower=False
                ),
                *(
                    Remark(
                        recipe,
                        "for different layers, as a matmul has one of the two",
                        slower=False,
                        turn_on=("precision.fp8_rules=[{path: q_proj, fp8: false}]",),
                    )
                    for recipe in ("FP8 (current)", "FP8 (delayed)", "FP8 (blockwise)")
                ),
            ),
            also=("compressed weights",),
        ),
    )
    method: Literal["qat"] = "qat"

    @property
    def title(self) -> str:
        group = "one scale an output" if self.group_size is None else f"groups of {self.group_size}"
        return f"quantized to int{self.bits} ({group})" + (", inputs to int8" if self.activations else "")

    @property
    def after_training(self) -> Rtn:
        return Rtn(path=self.path, bits=self.bits, group_size=self.group_size, activations=self.activations)

    def check(self, weight: Weight) -> None:
        super().check(weight)
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
                "layer; give embedding, head and experts a separate rule, without activations, before it."
            )
        if dense.dot_general is not jax.lax.dot_general:
            raise ConfigError(
                f"compression.rules: {weight.names[0]} has another matmul already, such as that of precision.fp8; "
                "set precision.fp8=none, or drop `activations`."
            )
        dense.dot_general = int8_dot_general
        # The values of the grid need more bits than bfloat16 has.
        dense.kernel = dense.kernel.copy(**{KEEP_FLOAT32: True})
