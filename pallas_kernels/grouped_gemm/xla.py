"""Grouped matmul in XLA: a loop over tiles of rows, each multiplied with its group's matrix, on any device.

(XLA's own `lax.ragged_dot` is, except on TPUs, a matmul of every row with every group's matrix, and a mask.)

Matrices that are packed in few bits are multiplied one at a time, each where a tile needs it, by the XLA products of
`packed_matmul`; for the gradient of the rows they are dequantized first. Those of empty groups are not read.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm import gradients
from pallas_kernels.grouped_gemm.groups import group_of_tiles
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.target import current_target
from pallas_kernels.weight_only.packed import PackedWeight, is_packed
from pallas_kernels.weight_only.request import PackedMatmulRequest
from pallas_kernels.weight_only.xla import multiply as multiply_packed

SMALLEST_TILE = 8
LARGEST_TILE = 512


def unsupported_reason(request: GroupedMatmulRequest) -> str | None:
    """Return None, as this backend computes every grouped matmul."""
    del request
    return None


def preferred_tile(rows: int, groups: int) -> int:
    """Return how many rows a tile should have: a power of two near a quarter of the mean group size.

    That is a compromise between little padding and large matmuls.
    """
    tile = SMALLEST_TILE
    while tile < LARGEST_TILE and 8 * tile * groups <= rows:
        tile *= 2
    return tile


def multiply(request: GroupedMatmulRequest) -> Float[Array, "R F"]:
    """Multiply the rows of each group with its matrix in XLA: [R, F] in the dtype of x, float32 accumulation."""
    tile = request.alignment
    if not SMALLEST_TILE <= tile <= LARGEST_TILE:
        tile = preferred_tile(request.x.shape[0], request.weights.shape[0])
    return gradients.multiply(Tiles(tile), request)


@dataclass(frozen=True)
class Tiles:
    """The grouped matmuls of the forward pass and the gradients, as XLA loops over tiles of `tile` rows."""

    tile: int

    def rows(self, x: jax.Array, weights: jax.Array | PackedWeight, sizes: jax.Array, transposed: bool) -> jax.Array:
        """Multiply each row with its group's matrix: [R, D] -> [R, F], or [R, F] -> [R, D] if `transposed`."""
        tiles = x.reshape(-1, self.tile, x.shape[1])
        groups, used = group_of_tiles(sizes, self.tile, tiles.shape[0])
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        accumulated = jnp.promote_types(x.dtype, jnp.float32)
        target = current_target()

        def step(_: None, item: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            rows, group, index = item
            if is_packed(weights) and not transposed:
                request = PackedMatmulRequest(rows, weights.take(group), accumulated, target)
                out = multiply_packed(request)
            else:
                matrix = _matrix(weights, group, x.dtype)
                out = lax.dot_general(rows, matrix, contracted, preferred_element_type=accumulated)
            return None, jnp.where(index < used, out, 0).astype(x.dtype)

        _, out = lax.scan(step, None, (tiles, groups, jnp.arange(tiles.shape[0])))
        return out.reshape(x.shape[0], -1)

    def matrices(self, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        """Sum x.T @ y over the rows of each group in float32: x [R, D], y [R, F] -> [G, D, F]."""
        tiles = x.shape[0] // self.tile
        groups, used = group_of_tiles(sizes, self.tile, tiles)
        accumulated = jnp.promote_types(x.dtype, jnp.float32)
        shape = x.shape[1], y.shape[1]

        def step(carry: tuple, item: tuple) -> tuple[tuple, None]:
            sums, out, before = carry
            x_rows, y_rows, group, index = item
            product = lax.dot_general(x_rows, y_rows, (((0,), (0,)), ((), ())), preferred_element_type=accumulated)
            sums = jnp.where(group == before, sums, 0) + jnp.where(index < used, product, 0)
            out = lax.dynamic_update_index_in_dim(out, sums.astype(x.dtype), group, 0)
            return (sums, out, group), None

        start = jnp.zeros(shape, accumulated), jnp.zeros((sizes.shape[0], *shape), x.dtype), jnp.int32(-1)
        cut = (x.reshape(tiles, self.tile, -1), y.reshape(tiles, self.tile, -1), groups, jnp.arange(tiles))
        return lax.scan(step, start, cut)[0][1]


def _matrix(
    weights: jax.Array | PackedWeight, group: Int[Array, ""], dtype: jax.typing.DTypeLike
) -> Float[Array, "D F"]:
    """Return the matrix of a group; a packed one dequantized in float32, and rounded to `dtype`."""
    if is_packed(weights):
        return weights.take(group).dense(dtype)
    return lax.dynamic_index_in_dim(weights, group, keepdims=False)
