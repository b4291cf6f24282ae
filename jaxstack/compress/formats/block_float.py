"""Block floating point: integers whose blocks share a power of two, after training and during it."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.base import AfterTraining, DuringTraining, Format
from jaxstack.compress.formats.integer_grid import group_size_problem
from pallas_kernels.weight_only.formats import powers_of_two
from pallas_kernels.weight_only.packed import PackedWeight, pack_block_float
from pallas_kernels.weight_only.rounding_grid import Grid


@dataclasses.dataclass(frozen=True)
class SharedExponents(Format):
    """Integers with one power of two per block of inputs, set by the block's largest magnitude.

    Attributes:
      grid: bits of an integer (its sign included), and number of inputs of a block.
    """

    grid: Grid

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_size_problem(self.grid.group_size, inputs, "block_size")

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        blocks = jnp.abs(w.astype(jnp.float32)).reshape(w.shape[0], self.grid.groups(w.shape[1]), -1)
        _, exponents = jnp.frexp(jnp.max(blocks, axis=-1))  # the largest magnitude is below 2^exponent
        exponents = jnp.clip(exponents - (self.grid.bits - 1), -126, 127)
        return pack_block_float(self.grid, self.grid.quantize(w, powers_of_two(exponents)), exponents)


class BlockFloat(AfterTraining, DuringTraining):
    """Rounds weights to integers with one power of two per block of inputs, set by the block's largest magnitude.

    Dequantization is a shift of the exponent, and exact in bfloat16. Needs no calibration text.
    """

    method: Literal["bfp"] = "bfp"
    bits: int = Field(default=8, ge=2, le=8)
    """Bits of an integer, its sign included."""
    block_size: int = Field(default=32, ge=1)
    """Number of inputs that share an exponent of 8 bits."""

    @property
    def format(self) -> SharedExponents:
        return SharedExponents(Grid(self.bits, self.block_size))

    @property
    def title(self) -> str:
        return f"block floating point of {self.bits} bits (blocks of {self.block_size})"
