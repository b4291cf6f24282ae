"""Block floating point: integers whose blocks share a power of two."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from jaxstack.compress.methods.rounding_base import group_size_problem
from pallas_kernels.weight_only.formats import powers_of_two
from pallas_kernels.weight_only.packed import pack_block_float
from pallas_kernels.weight_only.rounding_grid import Grid


class BlockFloat(Method):
    """Rounds weights to integers with one power of two per block of inputs, set by the block's largest magnitude.

    Dequantization is a shift of the exponent, and exact in bfloat16. Needs no calibration text.
    """

    method: Literal["bfp"] = "bfp"
    bits: int = Field(default=8, ge=2, le=8)
    """Bits of an integer, its sign included."""
    block_size: int = Field(default=32, ge=1)
    """Number of inputs that share an exponent of 8 bits."""

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_size_problem(self.block_size, inputs, "block_size")

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        grid = Grid(self.bits, self.block_size)
        blocks = jnp.abs(w.astype(jnp.float32)).reshape(w.shape[0], grid.groups(w.shape[1]), -1)
        _, exponents = jnp.frexp(jnp.max(blocks, axis=-1))  # the largest magnitude is below 2^exponent
        exponents = jnp.clip(exponents - (self.bits - 1), -126, 127)
        return pack_block_float(grid, grid.quantize(w, powers_of_two(exponents)), exponents)
