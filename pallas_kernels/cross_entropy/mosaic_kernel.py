"""Hopper kernel for the exponentials of a language model's logits; the logits themselves never go to memory.

exp(hidden @ weight - shift) leaves the registers of the product together with its sums over each row. Both matmuls of
the gradients can be made of it: the denominator of the softmax is one factor a row, which is applied to the other
operand or to the result.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import matmul, pipeline, scheduler
from pallas_kernels.hopper.matmul import TILE_ROWS, TiledProduct
from pallas_kernels.hopper.scheduler import Tile
from pallas_kernels.hopper.wgmma import ROWS, broadcast_row_values, filled_rows, load_rows
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

_TOTAL, _CHOSEN = range(2)


class Exponentials(NamedTuple):
    """Exponentials of the logits of R tokens over V vocabulary entries, and their sums over tiles of C columns.

    Attributes:
        values: [R, V], exp(logit - shift), in the dtype of the operands.
        totals: [V / C, R] float32, sums of the exponentials over the columns of a tile, before rounding.
        chosen: [V / C, R] float32, the label's logit in the tile that has it, else 0.
    """

    values: jax.Array
    totals: jax.Array
    chosen: jax.Array


class _Buffers(NamedTuple):
    """Shared memory of the kernel: operand tiles, and each row's sum of exponentials and label logit.

    The dims of `sums` are warpgroup, 64 rows of its part of the tile, `_TOTAL` or `_CHOSEN`, row.
    """

    operands: matmul.ProductBuffers
    sums: Ref


class _Inputs(NamedTuple):
    hidden: Ref
    weight: Ref
    labels: Ref
    shift: Ref


class _Outs(NamedTuple):
    """The kernel's results in global memory: the arrays of `Exponentials`."""

    values: Ref
    totals: Ref
    chosen: Ref


def exponentials(
    product: TiledProduct,
    hidden: Float[Array, "R D"],
    weight: Float[Array, "D V"],
    labels: Int[Array, " R"],
    shift: Float[Array, " R"],
) -> Exponentials:
    """Compute exp(hidden @ weight - shift), its row sums within each tile, and the logit of each token's label.

    Args:
        product: Static description of the product, [R, D] times [D, V].
        hidden: Hidden states, [R, D].
        weight: Output head, [D, V].
        labels: int32 [R].
        shift: float32 [R], subtracted from the logits of a row.
    """
    (rows, _), columns = hidden.shape, weight.shape[1]
    sums = jax.ShapeDtypeStruct((product.column_tiles, rows), jnp.float32)
    kernel = product.kernel(
        "exponentials",
        functools.partial(_body, product),
        out_type=(jax.ShapeDtypeStruct((rows, columns), hidden.dtype), sums, sums),
        scratch_types=_Buffers(
            operands=matmul.product_scratch(product, hidden.dtype),
            sums=plgpu.SMEM((matmul.CONSUMERS, product.own_rows // ROWS, 2, ROWS), jnp.float32),
        ),
        # Sums over the columns that a warp holds need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return Exponentials(*kernel(hidden, weight, labels, shift))


def _body(product: TiledProduct, hidden: Ref, weight: Ref, labels: Ref, shift: Ref, *references: Any) -> None:
    inputs = _Inputs(hidden, weight, labels, shift)
    outs = _Outs(*references[:3])
    buffers = _Buffers(*references[3:])

    def consume() -> None:
        scheduler.follow_tiles(product.order, None, functools.partial(_compute, product, inputs, outs, buffers))
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        # One warp is enough, and need not wait for three others at each copy.
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, inputs, buffers)
                matmul.drain(product, buffers.operands, scheduler.claim_tiles(product.order, None, None, load))

    pipeline.specialize(lax.axis_index("warpgroup"), matmul.CONSUMERS, consume, produce)


def _load(product: TiledProduct, inputs: _Inputs, buffers: _Buffers, number: Index, tile: Tile) -> None:
    rows = pl.ds(tile.row * TILE_ROWS, TILE_ROWS)
    matmul.load_tile(product, buffers.operands, number, tile, (inputs.hidden.at[rows],), (inputs.weight,))


def _compute(
    product: TiledProduct, inputs: _Inputs, outs: _Outs, buffers: _Buffers, number: Index, tile: Tile, _: Tile
) -> None:
    warpgroup = lax.axis_index("warpgroup")

    def finish(logits: jax.Array) -> None:
        for part in range(product.own_rows // ROWS):
            rows = pl.ds(product.first_own_row(tile) + part * ROWS, ROWS)
            own = logits[part * ROWS : (part + 1) * ROWS]
            found = _store_exponentials(product, inputs, outs.values, buffers.operands, own, (rows, tile.column))
            sums = buffers.sums.at[warpgroup, part]
            # The sums of the previous tile have been read by now: two later copies have been.
            sums[_TOTAL], sums[_CHOSEN] = found
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums.at[_TOTAL], outs.totals.at[tile.column, rows])
            plgpu.copy_smem_to_gmem(sums.at[_CHOSEN], outs.chosen.at[tile.column, rows])

    matmul.multiply_tile(product, buffers.operands, number, finish)


def _store_exponentials(
    product: TiledProduct,
    inputs: _Inputs,
    values: Ref,
    buffers: matmul.ProductBuffers,
    logits: jax.Array,
    place: tuple[Index, Index],
) -> tuple[jax.Array, jax.Array]:
    """Store the exponentials of logits [64, C] of a tile; return for each row their sum and its label's logit or 0.

    Args:
        product: The product.
        inputs: Inputs of the kernel.
        values: All exponentials in global memory, [R, V].
        buffers: Shared memory of the product.
        logits: Logits of 64 rows of the tile.
        place: Slice of these rows in `values`, and the number of the tile along the columns.
    """
    (rows, tile_column), width, piece_width = place, product.tiling.columns, product.tiling.store_columns
    label, shift = (load_rows(ref.at[rows], optimized=False) for ref in (inputs.labels, inputs.shift))
    label = label - tile_column * width
    shift = shift * math.log2(math.e)
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, piece_width), 1, layout=plgpu.Layout.WGMMA)
    total = filled_rows(0.0, ROWS)
    chosen = filled_rows(0.0, ROWS)

    def value(part: slice) -> jax.Array:
        nonlocal total, chosen
        piece = logits[:, part]
        here = column == broadcast_row_values(label - part.start, piece)
        chosen += jnp.where(here, piece, 0.0).sum(axis=1)
        result = jnp.exp2(piece * math.log2(math.e) - broadcast_row_values(shift, piece))
        total += result.sum(axis=1)
        return result

    def copy(slot: Ref, first: int) -> None:
        plgpu.copy_smem_to_gmem(slot, values.at[rows, pl.ds(tile_column * width + first, piece_width)])

    matmul.store_pieces(product, buffers, value, copy)
    return total, chosen
