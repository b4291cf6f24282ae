"""Hopper kernel of the fused MLP's backward pass: the activation inputs' gradients, computed from d_out @ weight.T.

d_hidden = d_out @ weight.T stays in registers: each piece of a tile meets the inputs of the activation there, which TMA
has brought to shared memory meanwhile, and their gradients leave from the same place. On request the kernel also sums
the gradients over rows, for the gradient of a bias, while they are in registers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.hopper import matmul, pipeline, scheduler
from pallas_kernels.hopper.matmul import CONSUMERS, TILE_ROWS, TiledProduct
from pallas_kernels.hopper.scheduler import Tile
from pallas_kernels.hopper.wgmma import ROWS, tiled_smem
from pallas_kernels.mosaic_api import WARPS, Index, Ref, pl, plgpu, store_warp_column_sums

PIECE = 64
"""Columns whose gradients are computed at a time."""
_PIECES_BYTES = 64 * 1024

ActivationGradient = Callable[[tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]]
"""Gradients of the inputs, from pieces [64, 64] of each input and of the gradient of the activation, all float32."""


class _Buffers(NamedTuple):
    """Shared memory and barriers of the kernel; the dims of `pieces` are warpgroup, slot, input, row, column."""

    operands: matmul.ProductBuffers
    pieces: Ref
    loaded: Ref
    free: Ref


class _Arrays(NamedTuple):
    d_out: Ref
    weight: Ref
    inputs: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    sums: tuple[Ref, ...]


def _slots(product: TiledProduct, inputs: int) -> int:
    """Return how many 64 x 64 pieces of each activation input fit into one warpgroup's part of shared memory."""
    room = _PIECES_BYTES // (inputs * CONSUMERS * ROWS * PIECE * 2)
    return min(room, len(_pieces(product)))


def _pieces(product: TiledProduct) -> list[tuple[int, int]]:
    """Return the first row and column of each piece within the part of a tile that one warpgroup computes."""
    rows = range(0, product.own_rows, ROWS)
    columns = range(0, product.tiling.columns, PIECE)
    return [(row, column) for column in columns for row in rows]


def gradients(
    product: TiledProduct,
    gradient: ActivationGradient,
    d_out: Float[Array, "T D"],
    weight: Float[Array, "F D"],
    inputs: tuple[Float[Array, "T F"], ...],
    with_sums: bool = False,
) -> tuple[tuple[Float[Array, "T F"], ...], tuple[Float[Array, "R F"], ...]]:
    """Compute the gradients of an activation's inputs, gradient(inputs, d_out @ weight.T), in one kernel.

    They are computed in float32 and rounded to the dtype of the inputs.

    Args:
        product: Static description of the product, [T, D] times [F, D] transposed.
        gradient: Computes pieces of the gradients of the inputs.
        d_out: Gradient of the matmul's result, [T, D].
        weight: The matmul's weight, [F, D].
        inputs: Inputs of the activation, each [T, F].
        with_sums: True to sum the gradients over rows as well.

    Returns:
        The gradients; and, with `with_sums`, for each gradient a float32 array [R, F] of partial sums, whose rows add
        up to the sum over all T rows.
    """
    count = len(inputs)
    slots = _slots(product, len(inputs))
    sums = jax.ShapeDtypeStruct((product.rows // product.own_rows * WARPS, weight.shape[0]), jnp.float32)
    kernel = product.kernel(
        "activation_gradient",
        functools.partial(_body, product, gradient, count, with_sums),
        out_type=(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs), *(sums,) * (count * with_sums)),
        scratch_types=_Buffers(
            operands=matmul.product_scratch(product, d_out.dtype)._replace(result=None),
            pieces=tiled_smem((CONSUMERS, slots, count, ROWS, PIECE), d_out.dtype),
            loaded=plgpu.Barrier(num_arrivals=count, num_barriers=CONSUMERS * slots),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS * slots),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    found = tuple(kernel(d_out, weight, *inputs))
    return found[:count], found[count:]


def _body(
    product: TiledProduct,
    gradient: ActivationGradient,
    count: int,
    with_sums: bool,
    d_out: Ref,
    weight: Ref,
    *references: Any,
) -> None:
    first_buffer = (3 if with_sums else 2) * count
    inputs, outs, sums = (references[i * count : min((i + 1) * count, first_buffer)] for i in range(3))
    arrays = _Arrays(d_out, weight, inputs, outs, sums)
    buffers = _Buffers(*references[first_buffer:])

    def consume() -> None:
        compute = functools.partial(_compute, product, gradient, arrays, buffers)
        scheduler.follow_tiles(product.order, None, compute)
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            # Two warps load: pieces wait for the tile that is being finished, the next tile's operands do not.
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers)
                number = scheduler.claim_tiles(product.order, None, None, load)
                matmul.drain(product, buffers.operands, number)

            @pl.when(warp == 1)
            def _():
                load = functools.partial(_load_pieces, product, arrays, buffers)
                number = scheduler.claim_tiles(product.order, None, None, load)
                _drain_pieces(product, buffers, _slots(product, count), number)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load(product: TiledProduct, arrays: _Arrays, buffers: _Buffers, number: Index, tile: Tile) -> None:
    rows = pl.ds(tile.row * TILE_ROWS, TILE_ROWS)
    matmul.load_tile(product, buffers.operands, number, tile, (arrays.d_out.at[rows],), (arrays.weight,))


def _load_pieces(product: TiledProduct, arrays: _Arrays, buffers: _Buffers, number: Index, tile: Tile) -> None:
    turns = product.tiling.turns
    slots = _slots(product, len(arrays.inputs))
    warpgroups = [lax.rem(number, CONSUMERS)] if turns else range(CONSUMERS)
    for piece, (row, column) in enumerate(_pieces(product)):
        for warpgroup in warpgroups:
            place = warpgroup * slots + piece % slots

            def wait(place: Index = place) -> None:
                plgpu.barrier_wait(buffers.free.at[place])

            pl.when(number >= (CONSUMERS if turns else 1))(wait) if piece < slots else wait()
            first_row = tile.row * TILE_ROWS + row + (0 if turns else warpgroup * ROWS)
            part = pl.ds(first_row, ROWS), pl.ds(tile.column * product.tiling.columns + column, PIECE)
            for index, source in enumerate(arrays.inputs):
                target = buffers.pieces.at[warpgroup, piece % slots, index]
                plgpu.copy_gmem_to_smem(source.at[part], target, buffers.loaded.at[place])


def _drain_pieces(product: TiledProduct, buffers: _Buffers, slots: int, tiles: Index) -> None:
    """Wait, in the warp that loads pieces, until every warpgroup that computed a tile has stored its last gradients."""
    for warpgroup in range(CONSUMERS):

        def wait(warpgroup: int = warpgroup) -> None:
            for slot in range(slots):
                plgpu.barrier_wait(buffers.free.at[warpgroup * slots + slot])

        pl.when(tiles > (warpgroup if product.tiling.turns else 0))(wait)


def _compute(
    product: TiledProduct,
    gradient: ActivationGradient,
    arrays: _Arrays,
    buffers: _Buffers,
    number: Index,
    tile: Tile,
    _: Tile,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    count = len(arrays.inputs)
    slots = _slots(product, count)
    pieces = _pieces(product)

    def release(piece: int, later: int) -> None:
        plgpu.wait_smem_to_gmem(later * count, wait_read_only=True)
        plgpu.barrier_arrive(buffers.free.at[warpgroup * slots + piece % slots])

    def parts_of(piece: int) -> list[Ref]:
        return [buffers.pieces.at[warpgroup, piece % slots, index] for index in range(count)]

    def values_of(piece: int) -> tuple[jax.Array, ...]:
        return tuple(plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for part in parts_of(piece))

    def store_sums(totals: tuple[jax.Array, ...], column: Index) -> None:
        first = lax.div(product.first_own_row(tile), product.own_rows) * WARPS
        columns = pl.ds(column, PIECE)
        for total, sums in zip(totals, arrays.sums, strict=True):
            store_warp_column_sums(total, sums.at[pl.ds(first, WARPS), columns], product.interpret)

    def finish(d_hidden: jax.Array) -> None:
        for piece, (row, column) in enumerate(pieces):
            plgpu.barrier_wait(buffers.loaded.at[warpgroup * slots + piece % slots])
            parts = parts_of(piece)
            values = values_of(piece)
            d_inputs = gradient(values, d_hidden[row : row + ROWS, column : column + PIECE])
            for part, value in zip(parts, d_inputs, strict=True):
                part[...] = value.astype(part.dtype)
            last = row + ROWS == product.own_rows
            if arrays.sums and last and row > 0:
                # The gradients of the rows above are still in shared memory; in registers there is no room for them.
                d_inputs = tuple(map(jnp.add, d_inputs, values_of(piece - 1)))
            plgpu.commit_smem()
            first_column = tile.column * product.tiling.columns + column
            place = pl.ds(product.first_own_row(tile) + row, ROWS), pl.ds(first_column, PIECE)
            for part, out in zip(parts, arrays.outs, strict=True):
                plgpu.copy_smem_to_gmem(part, out.at[place])
            if arrays.sums and last:
                store_sums(d_inputs, first_column)
            if piece > 0:
                release(piece - 1, 1)
        release(len(pieces) - 1, 0)

    matmul.multiply_tile(product, buffers.operands, number, finish)
