"""Rounding of weights to integers with one scale for each group of inputs.

Weights are matrices [out, in], as compressed-tensors stores them; a group is a run of consecutive inputs of a row.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Grid:
    """A symmetric integer grid: w ≈ q * scale with q from -2^(bits-1) to 2^(bits-1) - 1.

    Attributes:
      bits: bits of an integer, 2 to 8.
      group_size: number of inputs that share a scale; None: one scale for each output (a whole row).
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"A grid has 2 to 8 bits, not {self.bits}.")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, not {self.group_size}; None gives a scale to each row.")

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer of the grid."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    def groups(self, inputs: int) -> int:
        """Return the number of groups, each with its own scale, in a row of `inputs` weights.

        Raises:
          ValueError: the group size does not divide the row.
        """
        size = self.group_size or inputs
        if inputs % size:
            raise ValueError(f"Groups of {size} do not divide a row of {inputs} weights; choose a divisor of {inputs}.")
        return inputs // size

    def scales(self, w: Float[Array, "out in"]) -> Float[Array, "out groups"]:
        """Return float32 scales [out, groups] that fit each group's largest magnitude into the grid; 1 if all are 0.

        As in compressed-tensors, the largest magnitude is placed at half the integers' range (7.5 for 4 bits), between
        the two limits. Scales are stored in bfloat16, so their values are rounded to it here: weights are then rounded
        with the scales that they are multiplied by later.
        """
        grouped = w.astype(jnp.float32).reshape(w.shape[0], self.groups(w.shape[1]), -1)
        low, high = self.limits
        largest = jnp.max(jnp.abs(grouped), axis=-1) / ((high - low) / 2)
        return jnp.where(largest > 0, largest, 1.0).astype(jnp.bfloat16).astype(jnp.float32)

    def quantize(self, w: Float[Array, "out in"], scales: Float[Array, "out groups"]) -> Int[Array, "out in"]:
        """Return w / scale as int8, rounded to the nearest integer of the grid."""
        low, high = self.limits
        spread = jnp.repeat(scales, w.shape[1] // scales.shape[1], axis=1)
        return jnp.clip(jnp.round(w.astype(jnp.float32) / spread), low, high).astype(jnp.int8)

    def dequantize(self, q: Int[Array, "out in"], scales: Float[Array, "out groups"]) -> Float[Array, "out in"]:
        """Return q * scale in float32."""
        return q.astype(jnp.float32) * jnp.repeat(scales, q.shape[1] // scales.shape[1], axis=1)

    def round(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """Round w to the nearest values of the grid (RTN): quantize it with its own scales, dequantize to float32."""
        scales = self.scales(w)
        return self.dequantize(self.quantize(w, scales), scales)
