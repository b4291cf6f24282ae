"""Matrix product times reduce-scatter for Hopper: partial sums travel over NVLink while the next ones are computed.

A device computes the rows of the device after it first and its own last. Finished tiles go straight into the memory
of the device that owns them, one slot for each sender; the owner adds the slots, in an order that never changes, as
soon as its own product of the tile is there. Why nothing waits for ever: `mosaic_claims`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import mosaic_claims as claims
from pallas_kernels.collective_matmul import mosaic_product as pieces
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import COMPUTING, HALF, ROWS, Operands, Product
from pallas_kernels.mosaic_api import pl, plgpu


class _Buffers(NamedTuple):
    operands: Operands
    claimed: Any


class _Arrays(NamedTuple):
    lefts: tuple[Any, ...]
    rights: tuple[Any, ...]
    out: Any
    partial: Any


@functools.partial(jax.jit, static_argnums=0)  # equal calls, one a layer, are traced and lowered once
def multiply_scatter(product: Product, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]) -> jax.Array:
    """The sum over the devices, and over the pairs, of x @ w, of which this one gets its rows: [rows, columns].

    Partial sums travel in x's dtype and are added in float32.

    Args:
        xs: [devices * rows, depth].
        weights: [depth, columns], or transposed.
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
        scratch_types=_Buffers(pieces.operands(product, dtype), claims.scratch(product)),
    )
    out, partial = kernel(*xs, *weights)
    if product.devices == 1 or product.tiling.sum_in_kernel:
        return out
    return (out.astype(jnp.float32) + partial.astype(jnp.float32).sum(axis=0)).astype(dtype)


def _body(product: Product, *references: Any) -> None:
    number = len(product.depths)
    arrays = _Arrays(references[:number], references[number : 2 * number], *references[2 * number : 2 * number + 2])
    buffers = _Buffers(*references[2 * number + 2 :])
    arrived, counters = None, claims.counters(product)
    if product.devices > 1:
        senders, tiles_each = product.devices - 1, product.rows // ROWS * product.column_tiles
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((senders * tiles_each,)))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute = functools.partial(_compute, product, arrays, buffers.operands, arrived)
        last = claims.follow_tiles(product, buffers.claimed, compute)
        plgpu.wait_smem_to_gmem(0)
        if arrived is not None:
            _announce(product, arrived, last)

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, product, arrays, buffers.operands)
                count = claims.claim_tiles(product, buffers.claimed, counters, load)
                pieces.drain(product, buffers.operands, count)


def _load(product: Product, arrays: _Arrays, buffers: Operands, number: Any, tile: tiles.Tile) -> None:
    owner = tiles.chunk_scattered(tile.step, product.device(), product.devices)
    rows = pl.ds(owner * product.rows + tile.row * ROWS, ROWS)
    pieces.load_tile(product, buffers, number, tile, tuple(x.at[rows] for x in arrays.lefts), arrays.rights)


def _compute(
    product: Product,
    arrays: _Arrays,
    buffers: Operands,
    arrived: Any,
    number: Any,
    tile: tiles.Tile,
    before: tiles.Tile,
) -> None:
    rows = pl.ds(tile.row * ROWS + lax.axis_index("warpgroup") * HALF, HALF)
    own = product.devices - 1

    def columns_at(column: int) -> Any:
        return pl.ds(tile.column * product.tiling.columns + column, product.tiling.store_columns)

    def send(step: int, value: jax.Array) -> None:
        owner = product.peer(tiles.chunk_scattered(step, product.device(), product.devices))
        slot = plgpu.remote_ref(arrays.partial, owner).at[step]

        def copy(piece: Any, column: int) -> None:
            plgpu.copy_smem_to_gmem(piece, slot.at[rows, columns_at(column)])

        pieces.store_pieces(product, buffers, lambda columns: value[:, columns], copy)

    def keep(value: jax.Array) -> None:
        for sender in range(product.devices - 1):
            plgpu.semaphore_wait(arrived.at[_counter(product, sender, tile)], COMPUTING, decrement=False)

        def total(columns: slice) -> jax.Array:
            result = value[:, columns]
            if product.tiling.sum_in_kernel:
                for sender in range(product.devices - 1):
                    part = arrays.partial.at[sender, rows, columns_at(columns.start)]
                    result += plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            return result

        def copy(piece: Any, column: int) -> None:
            plgpu.copy_smem_to_gmem(piece, arrays.out.at[rows, columns_at(column)])

        pieces.store_pieces(product, buffers, total, copy)

    def finish(value: jax.Array) -> None:
        if arrived is not None:
            # The tile before has long arrived: waiting for it here, and not where it was sent, takes no time. It
            # must come before any wait for others.
            plgpu.wait_smem_to_gmem(0)
            _announce(product, arrived, before)
        for step in range(product.devices - 1):
            pl.when(tile.step == step)(functools.partial(send, step, value))
        pl.when(tile.step == own)(functools.partial(keep, value))

    pieces.multiply_tile(product, buffers, number, finish)


def _announce(product: Product, arrived: Any, tile: tiles.Tile) -> None:
    """Tells the owner of a tile, if it is another device, that this half of it is there."""

    @pl.when(tile.step < product.devices - 1)
    def _():
        owner = tiles.chunk_scattered(tile.step, product.device(), product.devices)
        pl.semaphore_signal(arrived.at[_counter(product, tile.step, tile)], device_id=product.peer(owner))


def _counter(product: Product, sender: Any, tile: tiles.Tile) -> Any:
    return (sender * (product.rows // ROWS) + tile.row) * product.column_tiles + tile.column
