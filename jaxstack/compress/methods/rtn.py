"""Rounding to nearest: integers with a scale for each output or for each group of inputs."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from pallas_kernels.weight_only.grid import Grid
from pallas_kernels.weight_only.packed import pack_integers


class Rtn(Method):
    """Rounds each weight to the nearest integer of a symmetric grid. Needs no calibration text."""

    method: Literal["rtn"] = "rtn"
    bits: int = Field(default=8, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=None, ge=1)
    """Number of inputs that share a scale. Default: one scale for each output."""

    @property
    def grid(self) -> Grid:
        """The grid that the weights are rounded to."""
        return Grid(self.bits, self.group_size)

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_reason(self.group_size, inputs)

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        scales = self.grid.scales(w)
        return pack_integers(self.grid, self.grid.quantize(w, scales), scales.astype(jnp.bfloat16))


def group_reason(group_size: int | None, inputs: int, name: str = "group_size") -> str | None:
    """Return why rows of so many inputs cannot be cut into groups, or None."""
    if group_size is None or inputs % group_size == 0:
        return None
    fitting = max(size for size in range(1, group_size + 1) if inputs % size == 0)
    return f"{name} {group_size} does not divide its {inputs} inputs; the nearest that does is {fitting}"
