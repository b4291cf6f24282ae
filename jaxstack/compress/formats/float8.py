"""FP8: numbers of 8 bits (e4m3) with a scale for each output, after training and during it.

With `activations: fp8` the products of many rows round their inputs too, and run on FP8 tensor cores.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.compress.base import AfterTraining, DuringTraining, Format
from jaxstack.compress.matrix import Weight
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.packed import PackedWeight, pack_float8


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """FP8 numbers (e4m3), with a scale for each output that maps its largest weight to 448, the FP8 maximum.

    Attributes:
      rounds_inputs: True if products of many rows round their inputs to FP8 too.
    """

    rounds_inputs: bool = False

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        largest = jnp.max(jnp.abs(w.astype(jnp.float32)), axis=1, keepdims=True) / limit
        scales = jnp.where(largest > 0, largest, 1.0).astype(jnp.bfloat16)  # rounded before it divides the weights
        q = jnp.clip(w.astype(jnp.float32) / scales.astype(jnp.float32), -limit, limit)
        return pack_float8(q, scales, round_inputs=self.rounds_inputs)


class Fp8(AfterTraining, DuringTraining):
    """Rounds weights to FP8 (e4m3), with a scale for each output that maps its largest weight to 448, the FP8 maximum.

    The relative precision is the same for large and small weights, where integers have the same absolute one. Needs no
    calibration text.
    """

    method: Literal["fp8"] = "fp8"
    activations: Literal["fp8"] | None = None
    """fp8: dense layers round the inputs of products of more than 16 rows, to FP8 with a scale for each token, and
    multiply on FP8 tensor cores; after training only. null: inputs are not rounded."""

    @property
    def format(self) -> Float8:
        return Float8(rounds_inputs=self.activations is not None)

    @property
    def rounds_inputs(self) -> bool:
        return self.activations is not None

    def check(self, weight: Weight) -> None:
        super().check(weight)
        if self.activations is not None:
            raise ConfigError(
                f"compression.rules: {weight.names[0]}: method fp8 rounds weights in training, and inputs after it; "
                "drop `activations`, or train with precision.fp8, which multiplies in FP8."
            )

    @property
    def title(self) -> str:
        return "rounded to FP8 (one scale an output)"
