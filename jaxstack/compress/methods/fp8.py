"""FP8: numbers of 8 bits (e4m3) with a scale for each output."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from pallas_kernels.weight_only.packed import pack_float8


class Fp8(Method):
    """Rounds weights to FP8 (e4m3), with a scale for each output that maps its largest weight to 448, the FP8 maximum.

    The relative precision is the same for large and small weights, where integers have the same absolute one. Needs no
    calibration text.
    """

    method: Literal["fp8"] = "fp8"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        largest = jnp.max(jnp.abs(w.astype(jnp.float32)), axis=1, keepdims=True) / limit
        scales = jnp.where(largest > 0, largest, 1.0).astype(jnp.bfloat16)  # rounded before it divides the weights
        q = jnp.clip(w.astype(jnp.float32) / scales.astype(jnp.float32), -limit, limit)
        return pack_float8(q.astype(jnp.float8_e4m3fn), scales)
