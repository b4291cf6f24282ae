"""All-gather and matmul in one kernel for Hopper: rows travel over NVLink while those already here are multiplied.

A warp on every multiprocessor copies this device's rows to all other devices, in small blocks by TMA. A counter for
each 128 rows tells the receiver's producer that they have arrived. A device begins with its own rows.
`hopper.scheduler` explains why no device waits forever.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.collective_matmul.chunk_order import chunk_gathered
from pallas_kernels.collective_matmul.mosaic_product import CollectiveProduct
from pallas_kernels.hopper import matmul, pipeline, scheduler
from pallas_kernels.hopper.matmul import DEPTH, TILE_ROWS
from pallas_kernels.hopper.scheduler import Tile
from pallas_kernels.hopper.wgmma import ROWS, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, fence_before_async_reads, pl, plgpu


class _Buffers(NamedTuple):
    """Shared memory and barriers of the kernel; the last three fields are None on one device."""

    operands: matmul.ProductBuffers
    travelling: Ref | None
    loaded: Ref | None
    claimed: scheduler.ClaimedTiles | None


class _Arrays(NamedTuple):
    """The kernel's arrays in global memory.

    `arrived` counts the blocks that have come, for each 128 gathered rows.
    """

    x: Ref
    weights: tuple[Ref, ...]
    outs: tuple[Ref, ...]
    gathered: Ref
    arrived: Ref | None


@functools.partial(jax.jit, static_argnums=0)  # Equal calls, one a layer, are traced and lowered once.
def gather_multiply(
    product: CollectiveProduct, x: Float[Array, "rows depth"], weights: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Float[Array, "all_rows depth"]]:
    """Gather the rows of x from all devices and multiply them with each of the weights, in one kernel.

    Args:
        product: Static description of the product.
        x: This device's rows, [rows, depth].
        weights: Each [depth, columns], or [columns, depth] if the product is transposed.

    Returns:
        The products, each [devices * rows, columns], and the gathered x [devices * rows, depth].
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
            matmul.product_scratch(product, x.dtype),
            tiled_smem((TILE_ROWS, DEPTH), x.dtype) if sends else None,
            plgpu.Barrier() if sends else None,
            product.claim_scratch(),
        ),
    )
    *outs, gathered = kernel(x, *weights)
    return tuple(outs), gathered if sends else x


def _body(product: CollectiveProduct, x: Ref, *references: Any) -> None:
    number = len(product.columns)
    weights = references[:number]
    outs = references[number : 2 * number]
    gathered = references[2 * number]
    buffers = _Buffers(*references[2 * number + 1 :])
    blocks = product.devices * product.row_tiles
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))) if product.devices > 1 else None
    arrays = _Arrays(x, weights, outs, gathered, arrived)
    tile_counter, send_counter = product.claim_counters()

    def consume() -> None:
        compute = functools.partial(_compute, product, arrays, buffers)
        scheduler.follow_tiles(product.order, buffers.claimed, compute)
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers)
                count = scheduler.claim_tiles(product.order, buffers.claimed, tile_counter, load)
                matmul.drain(product, buffers.operands, count)

            if send_counter is not None:
                pl.when(warp == 1)(functools.partial(_send, product, arrays, buffers, send_counter))

    pipeline.specialize(lax.axis_index("warpgroup"), matmul.CONSUMERS, consume, produce)


def _compute(
    product: CollectiveProduct, arrays: _Arrays, buffers: _Buffers, number: Index, tile: Tile, _: Tile
) -> None:
    source = chunk_gathered(tile.chunk, product.device(), product.devices)
    first = source * product.rows + tile.row * TILE_ROWS + lax.axis_index("warpgroup") * ROWS

    def finish(value: jax.Array) -> None:
        def copy(slot: Ref, column: int) -> None:
            def store(number: int, tile_column: Index) -> None:
                columns = pl.ds(tile_column * product.tiling.columns + column, product.tiling.store_columns)
                plgpu.copy_smem_to_gmem(slot, arrays.outs[number].at[pl.ds(first, ROWS), columns])

            product.locate_column(tile.column, store)

        matmul.store_pieces(product, buffers.operands, lambda columns: value[:, columns], copy)

    matmul.multiply_tile(product, buffers.operands, number, finish)


def _load(product: CollectiveProduct, arrays: _Arrays, buffers: _Buffers, number: Index, tile: Tile) -> None:
    load = functools.partial(matmul.load_tile, product, buffers.operands, number, tile)

    @pl.when(tile.chunk == 0)
    def _():
        load((arrays.x.at[pl.ds(tile.row * TILE_ROWS, TILE_ROWS)],), arrays.weights)

    if (arrived := arrays.arrived) is not None:

        @pl.when(tile.chunk > 0)
        def _():
            source = chunk_gathered(tile.chunk, product.device(), product.devices)
            first = source * product.rows + tile.row * TILE_ROWS
            plgpu.semaphore_wait(arrived.at[lax.div(first, TILE_ROWS)], product.steps, decrement=False)
            fence_before_async_reads()
            load((arrays.gathered.at[pl.ds(first, TILE_ROWS)],), arrays.weights)


def _send(product: CollectiveProduct, arrays: _Arrays, buffers: _Buffers, counter: Ref) -> None:
    """Copy blocks of this device's rows, claimed one by one, into the gathered array of every device.

    The programs of the device share its blocks through the counter. Its own gathered array is filled too.
    """
    me = product.device()
    blocks = product.row_tiles
    arrived = arrays.arrived
    travelling = buffers.travelling
    assert arrived is not None and travelling is not None

    def send(index: Index, claim_next: Callable[[], Index]) -> Index:
        block = lax.div(index, product.steps)
        part = pl.ds(lax.rem(index, product.steps) * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(arrays.x.at[pl.ds(block * TILE_ROWS, TILE_ROWS), part], travelling, buffers.loaded)
        plgpu.barrier_wait(buffers.loaded)
        to = pl.ds(me * product.rows + block * TILE_ROWS, TILE_ROWS), part
        for distance in range(1, product.devices):
            peer = product.peer(lax.rem(me + distance, product.devices))
            plgpu.copy_smem_to_gmem(travelling, plgpu.remote_ref(arrays.gathered, peer).at[to])
        plgpu.copy_smem_to_gmem(travelling, arrays.gathered.at[to])
        following = claim_next()  # The latency of the claim is hidden behind the copies.
        plgpu.wait_smem_to_gmem(0)
        signalled = arrived.at[me * blocks + block]
        for distance in range(1, product.devices):
            pl.semaphore_signal(signalled, device_id=product.peer(lax.rem(me + distance, product.devices)))
        return following

    scheduler.claim(blocks * product.steps, counter, send)
