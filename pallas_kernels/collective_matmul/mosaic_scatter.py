"""Matmul and reduce-scatter in one kernel for Hopper: partial sums travel over NVLink while the next ones are computed.

A device computes the rows of the device after it first and its own last. Finished tiles go straight into the memory of
the device that owns them, one slot for each sender. The owner adds the slots, always in the same order, as soon as its
own product of the tile is there. `hopper.scheduler` explains why no device waits forever.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.collective_matmul.chunk_order import chunk_scattered
from pallas_kernels.collective_matmul.mosaic_product import CollectiveProduct
from pallas_kernels.hopper import matmul, pipeline, scheduler
from pallas_kernels.hopper.matmul import CONSUMERS, TILE_ROWS, ProductBuffers
from pallas_kernels.hopper.scheduler import Tile
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu


class _Buffers(NamedTuple):
    operands: ProductBuffers
    claimed: scheduler.ClaimedTiles | None


class _Arrays(NamedTuple):
    """The kernel's arrays in global memory: operands, result, received partial sums and arrival counters.

    `arrived` counts the halves of each sender's tiles that have come.
    """

    lefts: tuple[Ref, ...]
    rights: tuple[Ref, ...]
    out: Ref
    partial: Ref
    arrived: Ref | None


@functools.partial(jax.jit, static_argnums=0)  # Equal calls, one a layer, are traced and lowered once.
def multiply_scatter(
    product: CollectiveProduct, xs: tuple[Array, ...], weights: tuple[Array, ...]
) -> Float[Array, "rows columns"]:
    """Sum x @ w over all pairs (x, w) and all devices, and return this device's rows of the sum, [rows, columns].

    Partial sums travel in the dtype of x and are added in float32.

    Args:
        product: Static description of the product.
        xs: Each [devices * rows, depth].
        weights: For each x, [depth, columns], or [columns, depth] if the product is transposed.
    """
    dtype, (columns,) = xs[0].dtype, product.columns
    slots = max(product.devices - 1, 1)
    kernel = product.kernel(
        "matmul_reduce_scatter",
        functools.partial(_body, product),
        out_type=(
            jax.ShapeDtypeStruct((product.rows, columns), dtype),
            jax.ShapeDtypeStruct((slots, product.rows, columns), dtype),
        ),
        scratch_types=_Buffers(matmul.product_scratch(product, dtype), product.claim_scratch()),
    )
    out, partial = kernel(*xs, *weights)
    if product.devices == 1 or product.tiling.sum_in_kernel:
        return out
    return (out.astype(jnp.float32) + partial.astype(jnp.float32).sum(axis=0)).astype(dtype)


def _body(product: CollectiveProduct, *references: Any) -> None:
    number = len(product.depths)
    lefts = references[:number]
    rights = references[number : 2 * number]
    out, partial = references[2 * number : 2 * number + 2]
    buffers = _Buffers(*references[2 * number + 2 :])
    arrived, (tile_counter, _) = None, product.claim_counters()
    if product.devices > 1:
        senders = product.devices - 1
        tiles_each = product.row_tiles * product.column_tiles
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((senders * tiles_each,)))
    arrays = _Arrays(lefts, rights, out, partial, arrived)

    def consume() -> None:
        compute = functools.partial(_compute, product, arrays, buffers.operands)
        last = scheduler.follow_tiles(product.order, buffers.claimed, compute)
        plgpu.wait_smem_to_gmem(0)
        if arrived is not None:
            _announce(product, arrived, last)

    def produce() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers.operands)
                count = scheduler.claim_tiles(product.order, buffers.claimed, tile_counter, load)
                matmul.drain(product, buffers.operands, count)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load(product: CollectiveProduct, arrays: _Arrays, buffers: ProductBuffers, number: Index, tile: Tile) -> None:
    owner = chunk_scattered(tile.chunk, product.device(), product.devices)
    rows = pl.ds(owner * product.rows + tile.row * TILE_ROWS, TILE_ROWS)
    matmul.load_tile(product, buffers, number, tile, tuple(x.at[rows] for x in arrays.lefts), arrays.rights)


def _compute(
    product: CollectiveProduct, arrays: _Arrays, buffers: ProductBuffers, number: Index, tile: Tile, previous: Tile
) -> None:
    """Compute this warpgroup's half of a tile; send it to the tile's owner, or, on the owner, add the received sums."""
    rows = pl.ds(tile.row * TILE_ROWS + lax.axis_index("warpgroup") * ROWS, ROWS)
    own = product.devices - 1

    def columns_at(column: int) -> Index:
        return pl.ds(tile.column * product.tiling.columns + column, product.tiling.store_columns)

    def send(step: int, value: jax.Array) -> None:
        owner = product.peer(chunk_scattered(step, product.device(), product.devices))
        slot = plgpu.remote_ref(arrays.partial, owner).at[step]

        def copy(piece: Ref, column: int) -> None:
            plgpu.copy_smem_to_gmem(piece, slot.at[rows, columns_at(column)])

        matmul.store_pieces(product, buffers, lambda columns: value[:, columns], copy)

    def reduce(value: jax.Array) -> None:
        if (arrived := arrays.arrived) is not None:
            for sender in range(product.devices - 1):
                plgpu.semaphore_wait(arrived.at[_counter(product, sender, tile)], CONSUMERS, decrement=False)

        def total(columns: slice) -> jax.Array:
            result = value[:, columns]
            if product.tiling.sum_in_kernel:
                for sender in range(product.devices - 1):
                    part = arrays.partial.at[sender, rows, columns_at(columns.start)]
                    result += plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            return result

        def copy(piece: Ref, column: int) -> None:
            plgpu.copy_smem_to_gmem(piece, arrays.out.at[rows, columns_at(column)])

        matmul.store_pieces(product, buffers, total, copy)

    def finish(value: jax.Array) -> None:
        if arrays.arrived is not None:
            # The previous tile has long arrived: waiting for it here, and not where it was sent, takes no time. The
            # announcement must come before this warpgroup waits for other devices.
            plgpu.wait_smem_to_gmem(0)
            _announce(product, arrays.arrived, previous)
        for step in range(product.devices - 1):
            pl.when(tile.chunk == step)(functools.partial(send, step, value))
        pl.when(tile.chunk == own)(functools.partial(reduce, value))

    matmul.multiply_tile(product, buffers, number, finish)


def _announce(product: CollectiveProduct, arrived: Ref, tile: Tile) -> None:
    """Signal the owner device of a tile, unless that is this device, that this warpgroup's half of it has arrived."""

    @pl.when(tile.chunk < product.devices - 1)
    def _():
        owner = chunk_scattered(tile.chunk, product.device(), product.devices)
        pl.semaphore_signal(arrived.at[_counter(product, tile.chunk, tile)], device_id=product.peer(owner))


def _counter(product: CollectiveProduct, sender: Index, tile: Tile) -> Index:
    return (sender * product.row_tiles + tile.row) * product.column_tiles + tile.column
