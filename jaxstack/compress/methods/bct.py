"""BCT (blockwise compression of Transformers): integers that share one power-of-two scale per tile of a matrix."""

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from pallas_kernels.low_bits.block_float import block_exponents, round_to_steps
from pallas_kernels.weight_only.formats import powers_of_two
from pallas_kernels.weight_only.packed import pack_tile_float

_CANDIDATES = 3
"""Steps that are tried for a tile: that of its largest magnitude, a half and a quarter of it, which clip outliers."""


class Bct(Method):
    """Rounds weights to integers with one power-of-two scale per tile of a matrix (Dong et al. 2023, arXiv:2304.01483).

    Of the steps that are powers of two each tile takes the one with the least squared error. Needs no calibration text.
    `jaxstack.compress.integers.in_integers` rounds activations and softmax too.
    """

    method: Literal["bct"] = "bct"
    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer, its sign included."""
    tile_size: int = Field(default=64, ge=1)
    """Rows and columns of a tile, which has one exponent of 8 bits."""
    tile_outputs: int | None = Field(default=None, ge=1)
    """Outputs of a tile; null: `tile_size`. Few suit matrices whose rows differ in size, such as embeddings."""

    @property
    def tile(self) -> tuple[int, int]:
        """Shape of a tile: its number of outputs and of inputs."""
        return self.tile_outputs or self.tile_size, self.tile_size

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        if self.tile_outputs and outputs % self.tile_outputs:
            fitting = math.gcd(outputs, self.tile_outputs)
            return f"tile_outputs {self.tile_outputs} does not divide its {outputs} outputs; {fitting} does"
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % self.tile_size and (name == "inputs" or not self.tile_outputs):
                sizes = (inputs,) if self.tile_outputs else (inputs, outputs)
                fitting = max(n for n in range(1, self.tile_size + 1) if all(size % n == 0 for size in sizes))
                return f"tile_size {self.tile_size} does not divide its {size} {name}; {fitting} does"
        return None

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        q, exponents = round_tiles(w, self.bits, *self.tile)
        return pack_tile_float(self.bits, q, exponents)


def round_tiles(
    w: Float[Array, "out in"], bits: int, rows: int, columns: int | None = None
) -> tuple[Int[Array, "out in"], Int[Array, "tiles_out tiles_in"]]:
    """Quantize a matrix in tiles [rows, columns] with power-of-two steps; return int8 integers and int8 exponents.

    Args:
      columns: default: as many as rows.
    """
    (outputs, inputs), columns = w.shape, columns or rows
    tiles = w.astype(jnp.float32).reshape(outputs // rows, rows, inputs // columns, columns)
    largest = block_exponents(jnp.abs(tiles).max((1, 3)), bits).astype(jnp.int32)

    def error(exponents: Int[Array, "tiles_out tiles_in"]) -> Float[Array, "tiles_out tiles_in"]:
        step = exponents[:, None, :, None]
        return jnp.square(round_to_steps(tiles, step, bits) * powers_of_two(step) - tiles).sum((1, 3))

    candidates = jnp.maximum(largest - jnp.arange(_CANDIDATES)[:, None, None], -100)
    best = jnp.argmin(jnp.stack([error(exponents) for exponents in candidates]), axis=0)
    exponents = jnp.take_along_axis(candidates, best[None], axis=0)[0]
    q = round_to_steps(tiles, exponents[:, None, :, None], bits).reshape(w.shape)
    return q, exponents.astype(jnp.int8)
