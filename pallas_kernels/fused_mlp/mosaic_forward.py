"""Hopper kernel of the first half of a feed-forward layer: a matmul, its bias and the activation, in one pass.

The activation is computed in the registers that hold the product. So the product is written for the backward
pass, but not read again for the activation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.hopper import matmul, pipeline, scheduler
from pallas_kernels.hopper.matmul import CONSUMERS, TILE_ROWS, TiledProduct
from pallas_kernels.hopper.scheduler import Tile
from pallas_kernels.hopper.wgmma import ROWS, broadcast_column_values, load_columns, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

PIECE = 64
"""Columns that are computed and stored at a time."""
_SLOTS = 2
"""Pieces of a warpgroup in shared memory: one is computed while the other is being stored."""


class _Buffers(NamedTuple):
    """Shared memory and barriers of the kernel; the dims of `pieces` are warpgroup, slot, array, row, column."""

    operands: matmul.ProductBuffers
    pieces: Ref


class _Arrays(NamedTuple):
    x: Ref
    weight: Ref
    bias: Ref
    outs: tuple[Ref, Ref]


def activated_product(
    product: TiledProduct,
    activation: Callable[[jax.Array], jax.Array],
    x: Float[Array, "T D"],
    weight: Float[Array, "D F"],
    bias: Float[Array, " F"],
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Compute y = x @ weight + bias and activation(y) in one kernel; return both.

    Both are computed in float32, the activation from y before it is rounded, and rounded to the dtype of x.

    Args:
        product: Static description of the product, [T, D] times [D, F].
        activation: Computes pieces [64, 64] of the activation in float32.
        x: [T, D].
        weight: [D, F] in the dtype of x.
        bias: float32 [F].
    """
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype)
    kernel = product.kernel(
        "activated_product",
        functools.partial(_body, product, activation),
        out_type=(out, out),
        scratch_types=_Buffers(
            operands=matmul.product_scratch(product, x.dtype)._replace(result=None),
            pieces=tiled_smem((CONSUMERS, _SLOTS, 2, ROWS, PIECE), x.dtype),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(kernel(x, weight, bias))


def _body(
    product: TiledProduct,
    activation: Callable[[jax.Array], jax.Array],
    x: Ref,
    weight: Ref,
    bias: Ref,
    *references: Any,
) -> None:
    arrays = _Arrays(x, weight, bias, references[:2])
    buffers = _Buffers(*references[2:])

    def consume() -> None:
        compute = functools.partial(_compute, product, activation, arrays, buffers)
        scheduler.follow_tiles(product.order, None, compute)
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers)
                number = scheduler.claim_tiles(product.order, None, None, load)
                matmul.drain(product, buffers.operands, number)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load(product: TiledProduct, arrays: _Arrays, buffers: _Buffers, number: Index, tile: Tile) -> None:
    rows = pl.ds(tile.row * TILE_ROWS, TILE_ROWS)
    matmul.load_tile(product, buffers.operands, number, tile, (arrays.x.at[rows],), (arrays.weight,))


def _compute(
    product: TiledProduct,
    activation: Callable[[jax.Array], jax.Array],
    arrays: _Arrays,
    buffers: _Buffers,
    number: Index,
    tile: Tile,
    _: Tile,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    row_pieces = product.own_rows // ROWS

    def finish(result: jax.Array) -> None:
        for column in range(0, product.tiling.columns, PIECE):
            columns = pl.ds(tile.column * product.tiling.columns + column, PIECE)
            bias = load_columns(arrays.bias.at[columns], optimized=False)
            for row in range(0, product.own_rows, ROWS):
                slot = buffers.pieces.at[warpgroup, (column // PIECE * row_pieces + row // ROWS) % _SLOTS]
                y = result[row : row + ROWS, column : column + PIECE]
                y = y + broadcast_column_values(bias, y)
                plgpu.wait_smem_to_gmem(2 * (_SLOTS - 1), wait_read_only=True)
                slot[0], slot[1] = y.astype(slot.dtype), activation(y).astype(slot.dtype)
                plgpu.commit_smem()
                rows = pl.ds(product.first_own_row(tile) + row, ROWS)
                for index, out in enumerate(arrays.outs):
                    plgpu.copy_smem_to_gmem(slot.at[index], out.at[rows, columns])

    matmul.multiply_tile(product, buffers.operands, number, finish)
