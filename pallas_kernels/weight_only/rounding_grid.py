"""Rounding of weights to integers with one scale for each group of inputs.

Weights are matrices [out, in], as compressed-tensors stores them; a group is a run of consecutive inputs of a row.
"""

import dataclasses
from typing import Any

import jax
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
        return _storable_scales(jnp.max(jnp.abs(grouped), axis=-1) / ((high - low) / 2))

    def fitted_scales(self, w: Float[Array, "*stack out in"]) -> Float[Array, "*stack out groups"]:
        """Return float32 scales [*stack, out, groups] with the smallest squared error of rounding; 1 if all are 0.

        They are searched among the scales that put a group's largest magnitude at an integer of the grid, and among 32
        more that put it between the grid's largest integer and about twice that, so that the largest weights are
        clipped. So a matrix whose values are already on a grid of this kind, such as one that GPTQ has rounded, is
        represented exactly.
        """
        grouped = w.astype(jnp.float32).reshape(*w.shape[:-1], self.groups(w.shape[-1]), -1)
        low, high = self.limits
        largest = jnp.max(jnp.abs(grouped), axis=-1)

        def keep_better(best: tuple[jax.Array, jax.Array], position: jax.Array) -> tuple[Any, None]:
            scales = _storable_scales(largest / position)
            step = scales[..., None]
            rounded = jnp.clip(jnp.round(grouped / step), low, high) * step
            error = jnp.sum(jnp.square(rounded - grouped), axis=-1)
            better = error < best[1]
            return (jnp.where(better, scales, best[0]), jnp.where(better, error, best[1])), None

        positions = jnp.concatenate([jnp.arange(1, 1 - low), jnp.linspace(high, -2 * low, 32)])
        worst = (jnp.ones_like(largest), jnp.full_like(largest, jnp.inf))
        return jax.lax.scan(keep_better, worst, positions.astype(jnp.float32))[0][0]

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


def _storable_scales(scales: jax.Array) -> jax.Array:
    """Return positive scales rounded to bfloat16, and 1 in place of 0, in float32."""
    return jnp.where(scales > 0, scales, 1.0).astype(jnp.bfloat16).astype(jnp.float32)
