"""The exponentials of the logits, which are never themselves in memory, for Hopper.

exp(hidden @ weight - shift) leaves the product's registers with its sums over each row. Both matmuls of the gradients
can be made of it: softmax's denominator is one factor a row, and goes to the other operand or to the result.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import mosaic_claims as claims
from pallas_kernels.collective_matmul import mosaic_product as products
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import COMPUTING, HALF, ROWS, Product
from pallas_kernels.mosaic_api import pl, plgpu

_TOTAL, _CHOSEN = range(2)


class Exponentials(NamedTuple):
    """Of R rows and V columns in tiles of C columns.

    values: [R, V], exp(logit - shift), in the dtype of the operands.
    totals: [V / C, R] float32, their sums over the columns of a tile, before rounding.
    chosen: [V / C, R] float32, the label's logit in the tile that has it, else 0.
    """

    values: jax.Array
    totals: jax.Array
    chosen: jax.Array


class _Buffers(NamedTuple):
    operands: products.Operands
    sums: Any  # [warpgroup, _TOTAL or _CHOSEN, row]


def exponentials(
    product: Product, hidden: jax.Array, weight: jax.Array, labels: jax.Array, shift: jax.Array
) -> Exponentials:
    """exp(hidden @ weight - shift), and what the loss needs of the logits.

    Args:
        product: [rows, D] times [D, V].
        hidden: [rows, D].
        weight: [D, V].
        labels: int32 [rows].
        shift: float32 [rows].
    """
    (rows, _), columns = hidden.shape, weight.shape[1]
    sums = jax.ShapeDtypeStruct((product.column_tiles, rows), jnp.float32)
    kernel = product.kernel(
        "exponentials",
        functools.partial(_body, product),
        out_type=(jax.ShapeDtypeStruct((rows, columns), hidden.dtype), sums, sums),
        scratch_types=_Buffers(
            operands=products.operands(product, hidden.dtype),
            sums=plgpu.SMEM((COMPUTING, 2, HALF), jnp.float32),
        ),
        # Sums over the columns that a warp holds need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return Exponentials(*kernel(hidden, weight, labels, shift))


def _body(product: Product, hidden: Any, weight: Any, labels: Any, shift: Any, *references: Any) -> None:
    outs, buffers = Exponentials(*references[:3]), _Buffers(*references[3:])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")
        claims.follow_tiles(product, None, functools.partial(_compute, product, (labels, shift), outs, buffers))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        number = claims.claim_tiles(product, None, None, functools.partial(_load, product, hidden, weight, buffers))
        products.drain(product, buffers.operands, number)


def _load(product: Product, hidden: Any, weight: Any, buffers: _Buffers, number: Any, tile: tiles.Tile) -> None:
    rows = pl.ds(tile.row * ROWS, ROWS)
    products.load_tile(product, buffers.operands, number, tile, (hidden.at[rows],), (weight,))


def _compute(
    product: Product, of_rows: tuple, outs: Exponentials, buffers: _Buffers, number: Any, tile: tiles.Tile, _: Any
) -> None:
    warpgroup, width, piece_width = lax.axis_index("warpgroup"), product.tiling.columns, product.tiling.store_columns
    rows = pl.ds(tile.row * ROWS + warpgroup * HALF, HALF)
    sums = buffers.sums.at[warpgroup]

    def finish(logits: jax.Array) -> None:
        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        label, shift = (load(source.at[rows]) for source in of_rows)
        label, shift = label - tile.column * width, shift * math.log2(math.e)
        column = plgpu.broadcasted_iota(jnp.int32, (HALF, piece_width), 1, layout=plgpu.Layout.WGMMA)
        totals, chosen = [], []

        def value(part: slice) -> jax.Array:
            piece = logits[:, part]
            here = column == lax.broadcast_in_dim(label - part.start, piece.shape, [0])
            chosen.append(jnp.where(here, piece, 0.0).sum(axis=1))
            result = jnp.exp2(piece * math.log2(math.e) - lax.broadcast_in_dim(shift, piece.shape, [0]))
            totals.append(result.sum(axis=1))
            return result

        def copy(slot: Any, first: int) -> None:
            plgpu.copy_smem_to_gmem(slot, outs.values.at[rows, pl.ds(tile.column * width + first, piece_width)])

        products.store_pieces(product, buffers.operands, value, copy)
        # Those of the tile before have been read by now: two younger copies are.
        sums[_TOTAL] = functools.reduce(jnp.add, totals)
        sums[_CHOSEN] = functools.reduce(jnp.add, chosen)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[_TOTAL], outs.totals.at[tile.column, rows])
        plgpu.copy_smem_to_gmem(sums.at[_CHOSEN], outs.chosen.at[tile.column, rows])

    products.multiply_tile(product, buffers.operands, number, finish)
