"""Grouped matmul with packed matrices, by the Triton kernel of `packed_matmul`, which reads them as stored."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_gemm import gradients, xla
from pallas_kernels.grouped_gemm.groups import group_of_tiles
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.target import Target, current_target
from pallas_kernels.weight_only import triton
from pallas_kernels.weight_only.packed import PackedWeight, is_packed
from pallas_kernels.weight_only.request import PackedMatmulRequest


def preferred_tile(rows: int, groups: int) -> int:
    """Return how many rows a tile should have where matrices are packed: at most what the kernel takes, if it runs."""
    tile = xla.preferred_tile(rows, groups)
    return tile if triton.unsupported_device(current_target()) else min(tile, triton.MOST_ROWS)


def unsupported_reason(request: GroupedMatmulRequest) -> str | None:
    """Return why the Triton kernel cannot compute this grouped matmul, or None if it can."""
    if not is_packed(request.weights):
        return "takes matrices packed in few bits"
    return triton.unsupported_tiles(request.x, _tile_of(request), request.weights, request.target)


def multiply(request: GroupedMatmulRequest) -> Float[Array, "R F"]:
    """Multiply the rows of each group with its packed matrix: [R, F] in the dtype of x."""
    return gradients.multiply(PackedTiles(_tile_of(request), request.target), request)


def _tile_of(request: GroupedMatmulRequest) -> int:
    tile = request.alignment
    if xla.SMALLEST_TILE <= tile <= triton.MOST_ROWS:
        return tile
    return min(xla.preferred_tile(request.x.shape[0], request.weights.shape[0]), triton.MOST_ROWS)


@dataclass(frozen=True)
class PackedTiles(xla.Tiles):
    """The forward pass by the Triton kernel, one matrix for each tile of rows; the gradient of the rows by XLA."""

    target: Target

    def rows(self, x: jax.Array, weights: jax.Array | PackedWeight, sizes: jax.Array, transposed: bool) -> jax.Array:
        if transposed:
            return super().rows(x, weights, sizes, transposed)
        tiles = x.shape[0] // self.tile
        groups, used = group_of_tiles(sizes, self.tile, tiles)
        groups = jnp.where(jnp.arange(tiles) < used, groups, -1)
        request = PackedMatmulRequest(x, cast(PackedWeight, weights), x.dtype, self.target)
        return triton.multiply_tiles(request, groups)
