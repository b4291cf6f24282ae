"""A tiled matmul for Hopper kernels that process the result in registers before they store it.

A tile of the result is 128 x 256 (or narrower): two consumer warpgroups compute 64 rows each, the producer loads the
operands of both. Where processing the result takes long, they compute whole tiles in turn (`ProductTiling.turns`), so
that the tensor cores work for one while the other finishes its tile. One program stays on each multiprocessor and
computes one tile after the other; the producer runs ahead of the consumers, across tiles. A kernel calls `load_tile` in
its producer and `multiply_tile` in its consumers, with the same tiles in the same order (`scheduler`).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.scheduler import Tile, TileOrder
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu
from pallas_kernels.target import multiprocessors

CONSUMERS = 2
"""Warpgroups that compute, each one half of a tile's rows."""
TILE_ROWS = CONSUMERS * wgmma.ROWS
DEPTH = 64
"""Depth of one step of the product: with 16-bit operands one swizzle of 128 bytes."""


@dataclass(frozen=True)
class ProductTiling:
    """Block sizes of a tiled matmul, for tuning.

    Attributes:
        columns: Columns of a tile.
        stages: Steps of the product in flight from global memory.
        group: Rows of tiles that are computed together (`TileOrder.group`).
        store_columns: Columns that go to global memory at a time.
        turns: True if the computing warpgroups compute whole tiles in turn, False if each computes half of every tile.
        cluster: Number of programs that compute tiles one above the other, and load their right operand only once.
    """

    columns: int = 256
    stages: int = 4
    group: int = 8
    store_columns: int = 32
    turns: bool = False
    cluster: int = 1


@dataclass(frozen=True)
class TiledProduct:
    """Compile-time description of a tiled matmul [chunks * rows, depth] @ [depth, columns] and its operands.

    Either one left operand is multiplied with several right ones, whose columns lie side by side in the result, or
    several pairs are multiplied and their products added.

    Attributes:
        rows: Rows of one chunk.
        depths: Depth of each pair of operands; one member unless there are several pairs.
        columns: Columns of each right operand; one member if there are several pairs.
        chunks: Chunks of rows, which the order of the tiles walks one after the other.
        transposed: True if the right operands are given as [columns, depth].
        tiling: Block sizes.
        programs: Programs of the kernel, one on each multiprocessor.
        interpret: True to interpret the kernel on a CPU.
    """

    rows: int
    depths: tuple[int, ...]
    columns: tuple[int, ...]
    chunks: int
    transposed: bool
    tiling: ProductTiling
    programs: int = 132
    interpret: bool = False

    @property
    def steps(self) -> int:
        """Number of steps along the contracted dim, `DEPTH` elements each, for one tile of the result."""
        return sum(self.depths) // DEPTH

    @property
    def row_tiles(self) -> int:
        """Number of tiles along the rows of the result, within one of its chunks of rows."""
        return self.rows // TILE_ROWS

    @property
    def column_tiles(self) -> int:
        """Number of tiles along the columns of the result."""
        return sum(self.columns) // self.tiling.columns

    @property
    def order(self) -> TileOrder:
        """Order in which the programs of the kernel compute the tiles of the result."""
        cluster = self.tiling.cluster
        return TileOrder(
            self.row_tiles, self.column_tiles, self.tiling.group, self.programs // cluster, self.chunks, cluster
        )

    @property
    def ring(self) -> Ring:
        """Circular shared-memory buffer through which the operands pass from global memory to the tensor cores."""
        return Ring(self.tiling.stages, self.interpret)

    @property
    def own_rows(self) -> int:
        """Number of rows of a tile that one warpgroup computes."""
        return TILE_ROWS if self.tiling.turns else wgmma.ROWS

    def first_own_row(self, tile: Tile) -> Index:
        """Return the first row, within its chunk, of the part of a tile that this warpgroup computes."""
        first = tile.row * TILE_ROWS
        return first if self.tiling.turns else first + lax.axis_index("warpgroup") * wgmma.ROWS

    def first_barrier(self, number: Index) -> Index:
        """Return the first of the ring's barriers at which the operands of tile `number` arrive.

        A warpgroup has to wait for each phase of a barrier, so with `ProductTiling.turns` each has its own barriers.
        """
        return lax.rem(number, CONSUMERS) * self.tiling.stages if self.tiling.turns else 0

    def locate_column(self, column: Index, visit: Callable[[int, Index], None]) -> None:
        """Call visit(i, local_column), where i is the right-hand operand that holds the given column of tiles."""
        _visit_part([size // self.tiling.columns for size in self.columns], column, visit)

    def locate_step(self, step: Index, visit: Callable[[int, Index], None]) -> None:
        """Call visit(i, local_step), where i is the pair of operands that holds this step along the contracted dim."""
        _visit_part([size // DEPTH for size in self.depths], step, visit)

    def kernel(self, name: str, body: Callable[..., None], **parameters: Any) -> Callable[..., Any]:
        """Build a launchable persistent kernel from its body, with as many programs as this matmul needs."""
        return pipeline.launch(
            name,
            body,
            consumers=CONSUMERS,
            programs=self.programs,
            cluster=self.tiling.cluster,
            interpret=self.interpret,
            **parameters,
        )


def single_product(
    rows: int, depth: int, columns: int, tiling: ProductTiling, *, transposed: bool = False, interpret: bool = False
) -> TiledProduct:
    """Return the compile-time description of a plain matmul [rows, depth] @ [depth, columns] on one device.

    One program runs on each multiprocessor, if there are as many tiles. Clusters are not used if their size does
    not divide the number of rows of tiles, or in interpret mode, which cannot load for several programs at once.
    """
    row_tiles = rows // TILE_ROWS
    if interpret or row_tiles % tiling.cluster:
        tiling = dataclasses.replace(tiling, cluster=1)
    total = row_tiles * (columns // tiling.columns)
    programs = 2 if interpret else min(multiprocessors() // tiling.cluster * tiling.cluster, total)
    return TiledProduct(rows, (depth,), (columns,), 1, transposed, tiling, programs, interpret)


def _visit_part(sizes: list[int], place: Index, visit: Callable[[int, Index], None]) -> None:
    first = 0
    for number, size in enumerate(sizes):
        inside = (place >= first) & (place < first + size)
        body = functools.partial(visit, number, place - first)
        pl.when(inside)(body) if len(sizes) > 1 else body()
        first += size


class ProductBuffers(NamedTuple):
    """Shared memory of a tiled matmul: operands in flight with their barriers, and pieces of the result.

    The dims of `result` are consumer, slot, row, column.
    With `ProductTiling.turns` each consumer has its own part of `full`.
    """

    left: Ref
    right: Ref
    result: Ref
    full: Ref
    empty: Ref


def product_scratch(product: TiledProduct, dtype: DTypeLike) -> ProductBuffers:
    """Return the types of a tiled matmul's shared-memory buffers, for the kernel's `scratch_types`."""
    tiling = product.tiling
    turns = product.tiling.turns
    right = (tiling.columns, DEPTH) if product.transposed else (DEPTH, tiling.columns)
    return ProductBuffers(
        left=wgmma.tiled_smem((tiling.stages, TILE_ROWS, DEPTH), dtype),
        right=wgmma.tiled_smem((tiling.stages, *right), dtype),
        result=wgmma.tiled_smem((CONSUMERS, 2, wgmma.ROWS, tiling.store_columns), dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages * (CONSUMERS if turns else 1)),
        empty=pipeline.empty_barriers(1 if turns else CONSUMERS, tiling.stages, tiling.cluster),
    )


def load_tile(
    product: TiledProduct,
    buffers: ProductBuffers,
    number: Index,
    tile: Tile,
    lefts: tuple[Ref, ...],
    rights: tuple[Ref, ...],
) -> None:
    """Copy the operands of this program's `number`-th tile to shared memory step by step, in the loading warpgroup.

    Args:
        product: The product.
        buffers: Its shared memory.
        number: Number of tiles that this program loaded before.
        tile: The tile.
        lefts: The tile's rows [128, depth] of each left operand.
        rights: The right operands, in full.
    """
    width = product.tiling.columns
    first_barrier = product.first_barrier(number)
    shared = "cluster" if product.tiling.cluster > 1 else None

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        full = buffers.full.at[first_barrier + slot]

        def copy(left: Ref, right: Ref, depth: Index, column: Index) -> None:
            part = pl.ds(depth * DEPTH, DEPTH)
            columns = pl.ds(column * width, width)
            plgpu.copy_gmem_to_smem(left.at[:, part], buffers.left.at[slot], full)
            block = right.at[columns, part] if product.transposed else right.at[part, columns]
            plgpu.copy_gmem_to_smem(block, buffers.right.at[slot], full, collective_axes=shared)

        if len(lefts) == 1:
            product.locate_column(tile.column, lambda i, column: copy(lefts[0], rights[i], index, column))
        else:
            product.locate_step(index, lambda i, depth: copy(lefts[i], rights[i], depth, tile.column))

    product.ring.produce(number * product.steps, product.steps, load)


def drain(product: TiledProduct, buffers: ProductBuffers, count: Index) -> None:
    """Wait in the loading warpgroup until the computing ones have read the operands of all `count` tiles."""
    product.ring.drain(count * product.steps, buffers.empty)


def multiply_tile(
    product: TiledProduct, buffers: ProductBuffers, number: Index, finish: Callable[[jax.Array], None]
) -> None:
    """Compute this warpgroup's part of output tile `number`, and pass it to `finish`: float32 [own_rows, columns].

    With `ProductTiling.turns` that is the whole tile or nothing.
    """
    warpgroup = lax.axis_index("warpgroup")
    rows = product.own_rows
    turns = product.tiling.turns
    own = pl.ds(0 if turns else warpgroup * rows, rows)

    def operands(slot: Index) -> tuple[Ref, Ref]:
        right = buffers.right.at[slot]
        return buffers.left.at[slot, own], right.transpose((1, 0)) if product.transposed else right

    def compute() -> None:
        shape = (rows, product.tiling.columns)
        first_barrier = product.first_barrier(number)
        barriers = (lambda slot: buffers.full.at[first_barrier + slot]), buffers.empty
        finish(product.ring.sum_products(number * product.steps, product.steps, shape, barriers, operands))

    pl.when(lax.rem(number, CONSUMERS) == warpgroup)(compute) if turns else compute()


def store_pieces(
    product: TiledProduct,
    buffers: ProductBuffers,
    value: Callable[[slice], jax.Array],
    copy: Callable[[Ref, int], None],
) -> None:
    """Store 64 rows of a tile to global memory piece by piece, rounded to the dtype of the result.

    The number of pieces must be even if a warpgroup stores more than once without waiting for all copies between.

    Args:
        product: The product.
        buffers: Its shared memory.
        value: Returns the given columns of these rows, [64, store_columns].
        copy: Called as copy(shared memory, first column); starts the copy of a piece to where it belongs.
    """
    warpgroup = lax.axis_index("warpgroup")
    width = product.tiling.store_columns
    for piece in range(product.tiling.columns // width):
        slot = buffers.result.at[warpgroup, piece % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = value(slice(piece * width, (piece + 1) * width)).astype(slot.dtype)
        plgpu.commit_smem()
        copy(slot, piece * width)
