"""All-gather times matrix for Hopper: the rows travel over NVLink while the rows that are here are multiplied.

A warp on every multiprocessor copies this device's rows to all others, in small blocks by TMA; a counter
for each 128 rows tells the receiver's loader that they are there. A device begins with its own rows. Why nothing waits
for ever: `mosaic_claims`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels.collective_matmul import mosaic_claims as claims
from pallas_kernels.collective_matmul import mosaic_product as pieces
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import COMPUTING, DEPTH, HALF, ROWS, Product
from pallas_kernels.mosaic_api import fence_before_async_reads, pl, plgpu


class _Buffers(NamedTuple):
    operands: Any
    travelling: Any
    loaded: Any
    claimed: Any


class _Arrays(NamedTuple):
    x: Any
    weights: tuple[Any, ...]
    outs: tuple[Any, ...]
    gathered: Any


@functools.partial(jax.jit, static_argnums=0)  # equal calls, one a layer, are traced and lowered once
def gather_multiply(
    product: Product, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(gathered x @ each of the weights [devices * rows, columns], gathered x [devices * rows, depth]).

    Args:
        x: [rows, depth], this device's.
        weights: [depth, columns], or transposed.
    """
    sends = product.devices > 1
    total = product.devices * product.rows
    kernel = product.kernel(
        "all_gather_matmul",
        functools.partial(_body, product),
        out_type=(
            *(jax.ShapeDtypeStruct((total, columns), x.dtype) for columns in product.columns),
            jax.ShapeDtypeStruct((total, x.shape[1]), x.dtype),
        ),
        scratch_types=_Buffers(
            pieces.operands(product, x.dtype),
            pieces.tiled((ROWS, DEPTH), x.dtype) if sends else None,
            plgpu.Barrier() if sends else None,
            claims.scratch(product),
        ),
    )
    *outs, gathered = kernel(x, *weights)
    return tuple(outs), gathered if sends else x


def _body(product: Product, x: Any, *references: Any) -> None:
    number = len(product.columns)
    arrays = _Arrays(x, references[:number], references[number : 2 * number], references[2 * number])
    buffers = _Buffers(*references[2 * number + 1 :])
    sends = product.devices > 1
    blocks = product.devices * product.rows // ROWS
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))) if sends else None
    counters = claims.counters(product)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")
        claims.follow_tiles(product, buffers.claimed, functools.partial(_compute, product, arrays, buffers))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers, arrived)
                count = claims.claim_tiles(product, buffers.claimed, counters, load)
                pieces.drain(product, buffers.operands, count)

            if sends:
                pl.when(warp == 1)(functools.partial(_send, product, arrays, buffers, arrived, counters))


def _compute(product: Product, arrays: _Arrays, buffers: _Buffers, number: Any, tile: tiles.Tile, _: Any) -> None:
    source = tiles.chunk_gathered(tile.step, product.device(), product.devices)
    first = source * product.rows + tile.row * ROWS + lax.axis_index("warpgroup") * HALF

    def finish(value: jax.Array) -> None:
        def copy(slot: Any, column: int) -> None:
            def store(number: int, tile_column: Any) -> None:
                columns = pl.ds(tile_column * product.tiling.columns + column, product.tiling.store_columns)
                plgpu.copy_smem_to_gmem(slot, arrays.outs[number].at[pl.ds(first, HALF), columns])

            product.by_column(tile.column, store)

        pieces.store_pieces(product, buffers.operands, lambda columns: value[:, columns], copy)

    pieces.multiply_tile(product, buffers.operands, number, finish)


def _load(product: Product, arrays: _Arrays, buffers: _Buffers, arrived: Any, number: Any, tile: tiles.Tile) -> None:
    load = functools.partial(pieces.load_tile, product, buffers.operands, number, tile)

    @pl.when(tile.step == 0)
    def _():
        load((arrays.x.at[pl.ds(tile.row * ROWS, ROWS)],), arrays.weights)

    if arrived is not None:

        @pl.when(tile.step > 0)
        def _():
            source = tiles.chunk_gathered(tile.step, product.device(), product.devices)
            first = source * product.rows + tile.row * ROWS
            plgpu.semaphore_wait(arrived.at[lax.div(first, ROWS)], product.steps, decrement=False)
            fence_before_async_reads()
            load((arrays.gathered.at[pl.ds(first, ROWS)],), arrays.weights)


def _send(product: Product, arrays: _Arrays, buffers: _Buffers, arrived: Any, counters: Any) -> None:
    """This program's share of this device's rows, to everyone's gathered array, the own included."""
    me, blocks = product.device(), product.rows // ROWS

    def send(index: Any, claim: Callable[[], Any]) -> Any:
        block, part = lax.div(index, product.steps), pl.ds(lax.rem(index, product.steps) * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(arrays.x.at[pl.ds(block * ROWS, ROWS), part], buffers.travelling, buffers.loaded)
        plgpu.barrier_wait(buffers.loaded)
        to = pl.ds(me * product.rows + block * ROWS, ROWS), part
        for distance in range(1, product.devices):
            peer = product.peer(lax.rem(me + distance, product.devices))
            plgpu.copy_smem_to_gmem(buffers.travelling, plgpu.remote_ref(arrays.gathered, peer).at[to])
        plgpu.copy_smem_to_gmem(buffers.travelling, arrays.gathered.at[to])
        following = claim()  # while the copies are on their way
        plgpu.wait_smem_to_gmem(0)
        signalled = arrived.at[me * blocks + block]
        for distance in range(1, product.devices):
            pl.semaphore_signal(signalled, device_id=product.peer(lax.rem(me + distance, product.devices)))
        return following

    claims.claim_sends(blocks * product.steps, counters, send)
