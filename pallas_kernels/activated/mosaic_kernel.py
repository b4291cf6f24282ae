"""The gradient of an activation inside of the product that it is multiplied with, for Hopper.

d_hidden = d_out @ weight.T stays in registers: while the tensor cores compute the next tile, each piece of it meets the
activation's inputs, which came to shared memory meanwhile, and their gradients leave from the same place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import mosaic_product as products
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import COMPUTING, HALF, ROWS, Product
from pallas_kernels.mosaic_api import pl, plgpu

PIECE = 32  # columns whose gradients are computed at a time
_SLOTS = 2  # pieces in shared memory: one is computed while the next one comes

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
    count = len(inputs)
    kernel = product.kernel(
        "activation_gradient",
        functools.partial(_body, product, gradient, count),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs),
        scratch_types=_Buffers(
            operands=products.operands(product, d_out.dtype)._replace(result=None),
            pieces=products.tiled((COMPUTING, _SLOTS, count, HALF, PIECE), d_out.dtype),
            loaded=plgpu.Barrier(num_arrivals=count, num_barriers=COMPUTING * _SLOTS),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=COMPUTING * _SLOTS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return tuple(kernel(d_out, weight, *inputs))


def _body(product: Product, gradient: Gradient, count: int, d_out: Any, weight: Any, *references: Any) -> None:
    arrays = _Arrays(d_out, weight, references[:count], references[count : 2 * count])
    buffers = _Buffers(*references[2 * count :])
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    number = tiles.count_for(program, product.programs, product.total_tiles)
    place = lambda number: product.tile(number * product.programs + program)  # noqa: E731

    @pl.when(warpgroup < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")

        def step(index: Any, before: jax.Array) -> jax.Array:
            turns = [functools.partial(finish, before, place(index - 1), piece) for piece in range(_pieces(product))]
            # A tile's gradients are computed while the tensor cores have the next one.
            meanwhile = [functools.partial(pl.when(index > 0), functools.partial(turn, index - 1)) for turn in turns]
            rounded = lambda d_hidden: d_hidden.astype(arrays.weight.dtype)  # noqa: E731
            return products.multiply_tile(product, buffers.operands, index, rounded, meanwhile)

        finish = functools.partial(_finish_piece, product, gradient, arrays, buffers)
        shape = (HALF, product.tiling.columns)
        zeros = plgpu.layout_cast(jnp.zeros(shape, arrays.weight.dtype), plgpu.Layout.WGMMA)
        last = lax.fori_loop(0, number, step, zeros)
        for piece in range(_pieces(product)):
            finish(last, place(number - 1), piece, number - 1)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(_place(buffers.free, warpgroup, _pieces(product) - 1))

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        def step(index: Any, _: None) -> None:
            load = functools.partial(_load_tile, product, arrays, buffers, index, place(index))
            for piece, steps in enumerate(product.share_steps(_pieces(product))):
                before = functools.partial(_load_piece, product, arrays, buffers, place(index - 1), piece, index - 1)
                pl.when(index > 0)(before)
                load(steps)

        lax.fori_loop(0, number, step, None)
        for piece in range(_pieces(product)):
            _load_piece(product, arrays, buffers, place(number - 1), piece, number - 1)
        products.drain(product, buffers.operands, number)
        for piece in range(_SLOTS):
            for part in range(COMPUTING):
                plgpu.barrier_wait(_place(buffers.free, part, piece))


def _pieces(product: Product) -> int:
    return product.tiling.columns // PIECE


def _place(barriers: Any, warpgroup: Any, piece: int) -> Any:
    return barriers.at[warpgroup * _SLOTS + piece % _SLOTS]


def _part(product: Product, tile: tiles.Tile, warpgroup: Any, piece: int) -> tuple[Any, Any]:
    """Where a warpgroup's piece of a tile lies in the inputs."""
    first_row, first_column = tile.row * ROWS + warpgroup * HALF, tile.column * product.tiling.columns + piece * PIECE
    return pl.ds(first_row, HALF), pl.ds(first_column, PIECE)


def _load_tile(
    product: Product, arrays: _Arrays, buffers: _Buffers, number: Any, tile: tiles.Tile, steps: tuple[int, int]
) -> None:
    rows = (arrays.d_out.at[pl.ds(tile.row * ROWS, ROWS)],)
    products.load_tile(product, buffers.operands, number, tile, rows, (arrays.weight,), steps)


def _load_piece(
    product: Product, arrays: _Arrays, buffers: _Buffers, tile: tiles.Tile, piece: int, number: Any
) -> None:
    """A piece of the inputs of this program's `number`-th tile, for each computing warpgroup."""
    for warpgroup in range(COMPUTING):
        wait = functools.partial(plgpu.barrier_wait, _place(buffers.free, warpgroup, piece))
        pl.when(number > 0)(wait) if piece < _SLOTS else wait()
        for index, source in enumerate(arrays.inputs):
            target = buffers.pieces.at[warpgroup, piece % _SLOTS, index]
            full = _place(buffers.loaded, warpgroup, piece)
            plgpu.copy_gmem_to_smem(source.at[_part(product, tile, warpgroup, piece)], target, full)


def _finish_piece(
    product: Product,
    gradient: Gradient,
    arrays: _Arrays,
    buffers: _Buffers,
    d_hidden: jax.Array,
    tile: tiles.Tile,
    piece: int,
    number: Any,
) -> None:
    """The gradients of a piece of this program's `number`-th tile, in the place of the inputs, and on their way out."""
    warpgroup, count = lax.axis_index("warpgroup"), len(arrays.inputs)
    plgpu.barrier_wait(_place(buffers.loaded, warpgroup, piece))
    held = [buffers.pieces.at[warpgroup, piece % _SLOTS, index] for index in range(count)]
    values = tuple(plgpu.load(slot, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for slot in held)
    found = gradient(values, d_hidden[:, piece * PIECE : (piece + 1) * PIECE].astype(jnp.float32))
    for slot, value in zip(held, found, strict=True):
        slot[...] = value.astype(slot.dtype)
    plgpu.commit_smem()
    for slot, out in zip(held, arrays.outs, strict=True):
        plgpu.copy_smem_to_gmem(slot, out.at[_part(product, tile, warpgroup, piece)])
    plgpu.wait_smem_to_gmem(count, wait_read_only=True)  # All but those just started: the piece before is free.
    release = functools.partial(plgpu.barrier_arrive, _place(buffers.free, warpgroup, piece - 1))
    pl.when(number > 0)(release) if piece == 0 else release()
