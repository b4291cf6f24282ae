"""The gradient of an activation inside of the product that it is multiplied with, for Hopper.

d_hidden = d_out @ weight.T stays in registers: each piece of a tile meets the activation's inputs there, which came to
shared memory meanwhile, and their gradients leave from the same place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import mosaic_claims as claims
from pallas_kernels.collective_matmul import mosaic_product as products
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import COMPUTING, HALF, ROWS, Product
from pallas_kernels.mosaic_api import pl, plgpu

PIECE = 64  # columns whose gradients are computed at a time
_PIECES_BYTES = 64 * 1024

Gradient = Callable[[tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]]


class _Buffers(NamedTuple):
    """Shared memory and its barriers; of `pieces` the dims are warpgroup, slot, input, row, column."""

    operands: products.Operands
    pieces: Any
    loaded: Any
    free: Any


class _Arrays(NamedTuple):
    d_out: Any
    weight: Any
    inputs: tuple[Any, ...]
    outs: tuple[Any, ...]


def _slots(product: Product, inputs: int) -> int:
    """Of pieces that are in shared memory at a time."""
    room = _PIECES_BYTES // (inputs * COMPUTING * HALF * PIECE * 2)
    return min(room, product.tiling.columns // PIECE)


def gradients(
    product: Product, gradient: Gradient, d_out: jax.Array, weight: jax.Array, inputs: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """gradient(inputs, d_out @ weight.T) in float32, rounded to the dtype of the inputs.

    Args:
        product: [rows, D] times [F, D] transposed.
        gradient: of pieces [64, 64] of each input, and of d_hidden: the pieces of the inputs' gradients.
        d_out: [rows, D].
        weight: [F, D].
        inputs: each [rows, F].
    """
    count, slots = len(inputs), _slots(product, len(inputs))
    kernel = product.kernel(
        "activation_gradient",
        functools.partial(_body, product, gradient, count),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs),
        scratch_types=_Buffers(
            operands=products.operands(product, d_out.dtype)._replace(result=None),
            pieces=products.tiled((COMPUTING, slots, count, HALF, PIECE), d_out.dtype),
            loaded=plgpu.Barrier(num_arrivals=count, num_barriers=COMPUTING * slots),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=COMPUTING * slots),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return tuple(kernel(d_out, weight, *inputs))


def _body(product: Product, gradient: Gradient, count: int, d_out: Any, weight: Any, *references: Any) -> None:
    arrays = _Arrays(d_out, weight, references[:count], references[count : 2 * count])
    buffers = _Buffers(*references[2 * count :])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")
        claims.follow_tiles(product, None, functools.partial(_compute, product, gradient, arrays, buffers))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            # By two warps: pieces wait for the tile that is being finished, operands of the next one do not.
            @pl.when(warp == 0)
            def _():
                number = claims.claim_tiles(product, None, None, functools.partial(_load, product, arrays, buffers))
                products.drain(product, buffers.operands, number)

            @pl.when(warp == 1)
            def _():
                claims.claim_tiles(product, None, None, functools.partial(_load_pieces, product, arrays, buffers))
                for slot in range(COMPUTING * _slots(product, count)):
                    plgpu.barrier_wait(buffers.free.at[slot])


def _part(product: Product, tile: tiles.Tile, warpgroup: Any, piece: int) -> tuple[Any, Any]:
    """Where a warpgroup's piece of a tile lies in the inputs."""
    first_row, first_column = tile.row * ROWS + warpgroup * HALF, tile.column * product.tiling.columns + piece * PIECE
    return pl.ds(first_row, HALF), pl.ds(first_column, PIECE)


def _load(product: Product, arrays: _Arrays, buffers: _Buffers, number: Any, tile: tiles.Tile) -> None:
    rows = pl.ds(tile.row * ROWS, ROWS)
    products.load_tile(product, buffers.operands, number, tile, (arrays.d_out.at[rows],), (arrays.weight,))


def _load_pieces(product: Product, arrays: _Arrays, buffers: _Buffers, number: Any, tile: tiles.Tile) -> None:
    slots = _slots(product, len(arrays.inputs))
    for piece in range(product.tiling.columns // PIECE):
        for warpgroup in range(COMPUTING):
            place = warpgroup * slots + piece % slots

            def wait(place: int = place) -> None:
                plgpu.barrier_wait(buffers.free.at[place])

            pl.when(number > 0)(wait) if piece < slots else wait()
            for index, source in enumerate(arrays.inputs):
                target = buffers.pieces.at[warpgroup, piece % slots, index]
                part = _part(product, tile, warpgroup, piece)
                plgpu.copy_gmem_to_smem(source.at[part], target, buffers.loaded.at[place])


def _compute(
    product: Product, gradient: Gradient, arrays: _Arrays, buffers: _Buffers, number: Any, tile: tiles.Tile, _: Any
) -> None:
    warpgroup, count = lax.axis_index("warpgroup"), len(arrays.inputs)
    slots, pieces = _slots(product, count), product.tiling.columns // PIECE

    def release(piece: int, younger: int) -> None:
        plgpu.wait_smem_to_gmem(younger * count, wait_read_only=True)
        plgpu.barrier_arrive(buffers.free.at[warpgroup * slots + piece % slots])

    def finish(d_hidden: jax.Array) -> None:
        for piece in range(pieces):
            plgpu.barrier_wait(buffers.loaded.at[warpgroup * slots + piece % slots])
            held = [buffers.pieces.at[warpgroup, piece % slots, index] for index in range(count)]
            values = tuple(plgpu.load(slot, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for slot in held)
            found = gradient(values, d_hidden[:, piece * PIECE : (piece + 1) * PIECE])
            for slot, value in zip(held, found, strict=True):
                slot[...] = value.astype(slot.dtype)
            plgpu.commit_smem()
            for slot, out in zip(held, arrays.outs, strict=True):
                plgpu.copy_smem_to_gmem(slot, out.at[_part(product, tile, warpgroup, piece)])
            if piece > 0:
                release(piece - 1, 1)
        release(pieces - 1, 0)

    products.multiply_tile(product, buffers.operands, number, finish)
