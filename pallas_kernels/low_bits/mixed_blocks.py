"""4-bit activations with the outlier channels gathered in 8-bit blocks, and their products with 4-bit weights.

The numerics of COMET's W4A4KV4 (Liu et al. 2024, arXiv:2410.12168): the channels of a layer's input are permuted once,
so that those with the largest magnitudes fill the first blocks of 128; these are rounded to int8, all others to int4,
each block of a token with its own scale. The weights' inputs are permuted in the same way, so that no product changes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.weight_only.rounding_grid import Grid

BLOCK = 128
"""Channels that share a scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedBlockActivations:
    """Quantized activations [M, K] with permuted channels: the first blocks in 8 bits, the others in 4.

    Attributes:
      q: int8 [M, K]; the first `wide` blocks hold 8-bit integers, the others 4-bit ones.
      scales: float32 [M, K / BLOCK].
      wide: number of blocks with 8-bit integers.
    """

    q: Int[Array, "M K"]
    scales: Float[Array, "M blocks"]
    wide: int = dataclasses.field(metadata={"static": True})

    @property
    def bits(self) -> float:
        """Average number of bits per value, without scales."""
        return 4 + 4 * self.wide / self.scales.shape[1]


def outlier_order(magnitudes: Float[Array, " K"]) -> Int[Array, " K"]:
    """Return the order of channels by descending magnitude, int32: outliers then share the first blocks."""
    return jnp.argsort(-magnitudes).astype(jnp.int32)


def count_wide_blocks(magnitudes: Float[Array, " K"], factor: float = 8.0) -> int:
    """Return how many 8-bit blocks all outlier channels need; their magnitudes exceed `factor` times the median."""
    outliers = int((magnitudes > factor * jnp.median(magnitudes)).sum())
    return -(-outliers // BLOCK)


def quantize_activations(x: Float[Array, "M K"], order: Int[Array, " K"], wide: int) -> MixedBlockActivations:
    """Permute channels by `order`, and quantize activations to 8 bits in the first `wide` blocks, 4 bits in the others.

    Raises:
      ValueError: K is not a multiple of 128, or it has fewer than `wide` blocks.
    """
    blocks = x.shape[1] // BLOCK
    if x.shape[1] % BLOCK or not 0 <= wide <= blocks:
        raise ValueError(f"{x.shape[1]} channels are not blocks of {BLOCK}, {wide} of them wide; pad the channels.")
    sorted_x = x[:, order]
    edge = wide * BLOCK
    halves = ((Grid(8, BLOCK), sorted_x[:, :edge]), (Grid(4, BLOCK), sorted_x[:, edge:]))
    parts = [(grid, part) for grid, part in halves if part.shape[1]]
    scales = [grid.scales(part) for grid, part in parts]
    q = [grid.quantize(part, own) for (grid, part), own in zip(parts, scales, strict=True)]
    return MixedBlockActivations(jnp.concatenate(q, axis=1), jnp.concatenate(scales, axis=1), wide)


def quantize_weights(
    w: Float[Array, "N K"], order: Int[Array, " K"]
) -> tuple[Int[Array, "N K"], Float[Array, "N blocks"]]:
    """Quantize weights to 4-bit integers (int8 array), inputs permuted by `order`, with a scale per block of inputs."""
    grid = Grid(4, BLOCK)
    sorted_w = w[:, order]
    scales = grid.scales(sorted_w)
    return grid.quantize(sorted_w, scales), scales


def mixed_matmul(
    x: MixedBlockActivations, w: Int[Array, "N K"], w_scales: Float[Array, "N blocks"]
) -> Float[Array, "M N"]:
    """Multiply activations of 8-bit and 4-bit blocks by the transpose of w: int8 products, scaled block by block."""
    blocks = x.scales.shape[1]
    xs, ws = (a.reshape(a.shape[0], blocks, -1) for a in (x.q, w))
    sums = jnp.einsum("mbk,nbk->bmn", xs, ws, preferred_element_type=jnp.int32)
    return jnp.einsum("bmn,mb,nb->mn", sums.astype(jnp.float32), x.scales, w_scales, precision="highest")


def dequantize_activations(x: MixedBlockActivations) -> Float[Array, "M K"]:
    """Dequantize activations of mixed 8-bit and 4-bit blocks to float32; channels stay permuted."""
    return x.q.astype(jnp.float32) * jnp.repeat(x.scales, BLOCK, axis=1)
