"""The matrix product inside the Hopper kernels: tiles of 128 x 256 by two warpgroups, operands loaded by a third.

One program stays on each multiprocessor and computes one tile after the other; the loading warpgroup runs ahead of the
computing ones, across tiles.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import tiles
from pallas_kernels.mosaic_api import pl, plgpu
from pallas_kernels.target import multiprocessors

COMPUTING = 2  # warpgroups, each with one half of a tile's rows
ROWS = 128
HALF = ROWS // COMPUTING
DEPTH = 64  # of a step: one swizzle of 128 bytes


@dataclass(frozen=True)
class Tiling:
    """What can be tuned.

    Attributes:
        columns: of a tile.
        stages: steps of the product in flight from global memory.
        group: rows of tiles that are computed together (`tiles.place`).
        store_columns: that go to global memory at a time.
        sum_in_kernel: whether the scattering kernel adds what arrived, or XLA after it.
    """

    columns: int = 256
    stages: int = 4
    group: int = 8
    store_columns: int = 32
    sum_in_kernel: bool = True


@dataclass(frozen=True)
class Product:
    """Static description of one kernel: [devices * rows, depth] times [depth, columns].

    One left operand with several right ones (their columns beside each other), or several pairs whose products are
    added (their depths one after the other).

    Attributes:
        rows: of one device's chunk.
        depths, columns: of the operands; one of the two has a single member.
        devices: of the axis.
        axis_name: of the axis; unused where there is one device.
        transposed: whether the right operands are given as [columns, depth].
        tiling: see there.
        programs: one for each multiprocessor.
        interpret: whether it is interpreted on a CPU.
    """

    rows: int
    depths: tuple[int, ...]
    columns: tuple[int, ...]
    devices: int
    axis_name: Any
    transposed: bool
    tiling: Tiling
    programs: int = 132
    interpret: bool = False

    @property
    def steps(self) -> int:
        return sum(self.depths) // DEPTH

    @property
    def row_tiles(self) -> int:
        """Of one chunk."""
        return self.rows // ROWS

    @property
    def column_tiles(self) -> int:
        return sum(self.columns) // self.tiling.columns

    @property
    def total_tiles(self) -> int:
        """Of all chunks."""
        return self.devices * self.row_tiles * self.column_tiles

    def device(self) -> Any:
        """This device's place on the axis."""
        return lax.axis_index(self.axis_name) if self.devices > 1 else jnp.int32(0)

    def peer(self, place: Any) -> dict[Any, Any]:
        """How Pallas is told another device of the axis."""
        return {self.axis_name: place}

    def by_column(self, column: Any, visit: Callable[[int, Any], None]) -> None:
        """visit(i, column of tiles within it) for the member of `columns` in which this column of tiles lies."""
        _visit_part([size // self.tiling.columns for size in self.columns], column, visit)

    def by_step(self, step: Any, visit: Callable[[int, Any], None]) -> None:
        """visit(i, step within it) for the member of `depths` in which this step lies."""
        _visit_part([size // DEPTH for size in self.depths], step, visit)

    def tile(self, index: Any) -> tiles.Tile:
        return tiles.place(index, self.row_tiles, self.column_tiles, self.tiling.group)

    def kernel(self, name: str, body: Callable, **parameters: Any) -> Callable:
        """`plgpu.kernel` with what both kernels share; a profile shows the name."""
        return plgpu.kernel(
            body,
            kernel_name=name,
            grid=(self.programs,),
            grid_names=("program",),
            num_threads=COMPUTING + 1,
            thread_name="warpgroup",
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
            **parameters,
        )


def on_one_device(
    rows: int, depth: int, columns: int, tiling: Tiling, *, transposed: bool = False, interpret: bool = False
) -> Product:
    """[rows, depth] times [depth, columns], or [columns, depth] transposed: a program for each multiprocessor."""
    tiles_in_all = rows // ROWS * (columns // tiling.columns)
    programs = 2 if interpret else min(multiprocessors(), tiles_in_all)
    return Product(rows, (depth,), (columns,), 1, None, transposed, tiling, programs, interpret)


def _visit_part(sizes: list[int], place: Any, visit: Callable[[int, Any], None]) -> None:
    first = 0
    for number, size in enumerate(sizes):
        inside = (place >= first) & (place < first + size)
        body = functools.partial(visit, number, place - first)
        pl.when(inside)(body) if len(sizes) > 1 else body()
        first += size


class Operands(NamedTuple):
    """Rings of shared memory for both operands, tiles on their way out, and the rings' barriers."""

    left: Any
    right: Any
    result: Any
    full: Any
    empty: Any


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiled and swizzled form of wgmma and TMA."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    elements = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operands(product: Product, dtype: Any) -> Operands:
    """The shared memory of a product."""
    tiling = product.tiling
    right = (tiling.columns, DEPTH) if product.transposed else (DEPTH, tiling.columns)
    return Operands(
        left=tiled((tiling.stages, ROWS, DEPTH), dtype),
        right=tiled((tiling.stages, *right), dtype),
        result=tiled((COMPUTING, 2, HALF, tiling.store_columns), dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
        empty=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tiling.stages),
    )


def load_tile(
    product: Product, buffers: Operands, number: Any, tile: tiles.Tile, lefts: tuple[Any, ...], rights: tuple[Any, ...]
) -> None:
    """Streams the operands of this program's `number`-th tile; `lefts` hold its rows [128, depth]."""
    stages, width = product.tiling.stages, product.tiling.columns

    def step(index: Any, _: None) -> None:
        count = number * product.steps + index
        slot = lax.rem(count, stages)

        @pl.when(count >= stages)
        def _():
            plgpu.barrier_wait(buffers.empty.at[slot])

        full = buffers.full.at[slot]

        def copy(left: Any, right: Any, depth: Any, column: Any) -> None:
            part, columns = pl.ds(depth * DEPTH, DEPTH), pl.ds(column * width, width)
            plgpu.copy_gmem_to_smem(left.at[:, part], buffers.left.at[slot], full)
            block = right.at[columns, part] if product.transposed else right.at[part, columns]
            plgpu.copy_gmem_to_smem(block, buffers.right.at[slot], full)

        if len(lefts) == 1:
            product.by_column(tile.column, lambda i, column: copy(lefts[0], rights[i], index, column))
        else:
            product.by_step(index, lambda i, depth: copy(lefts[i], rights[i], depth, tile.column))

    lax.fori_loop(0, product.steps, step, None)


def drain(product: Product, buffers: Operands, count: Any) -> None:
    """The loader leaves when all that it loaded is consumed."""
    total = count * product.steps

    def wait(index: Any, _: None) -> None:
        plgpu.barrier_wait(buffers.empty.at[lax.rem(index, product.tiling.stages)])

    lax.fori_loop(jnp.maximum(total - product.tiling.stages, 0), total, wait, None)


def multiply_tile(product: Product, buffers: Operands, number: Any, finish: Callable[[jax.Array], None]) -> None:
    """One warpgroup's half of a tile: finish(product [64, columns] in float32)."""
    stages = product.tiling.stages
    rows = pl.ds(lax.axis_index("warpgroup") * HALF, HALF)

    def scoped(accumulator: Any) -> jax.Array:
        def step(index: Any, _: None) -> None:
            count = number * product.steps + index
            slot = lax.rem(count, stages)
            plgpu.barrier_wait(buffers.full.at[slot])
            right = buffers.right.at[slot]
            right = right.transpose((1, 0)) if product.transposed else right
            plgpu.wgmma(accumulator, buffers.left.at[slot, rows], right)
            plgpu.wgmma_wait(1)

            @pl.when(index > 0)
            def _():
                _release(product, buffers.empty.at[lax.rem(count - 1, stages)])

        lax.fori_loop(0, product.steps, step, None)
        plgpu.wgmma_wait(0)
        _release(product, buffers.empty.at[lax.rem((number + 1) * product.steps - 1, stages)])
        return accumulator[...]

    finish(pl.run_scoped(scoped, plgpu.ACC((HALF, product.tiling.columns), jnp.float32)))


def _release(product: Product, barrier: Any) -> None:
    if product.interpret:
        plgpu.commit_smem()  # Interpret mode asks for a fence that hardware does not need after reads.
    plgpu.barrier_arrive(barrier)


def store_pieces(product: Product, buffers: Operands, value: Any, copy: Callable[[Any, Any], None]) -> None:
    """Rounds value(columns) to the output's dtype, piece by piece; copy(shared memory, columns) starts its way out."""
    warpgroup, width = lax.axis_index("warpgroup"), product.tiling.store_columns
    for piece in range(product.tiling.columns // width):
        slot = buffers.result.at[warpgroup, piece % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = value(slice(piece * width, (piece + 1) * width)).astype(slot.dtype)
        plgpu.commit_smem()
        copy(slot, piece * width)
