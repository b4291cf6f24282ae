"""Persistent Hopper kernels of the grouped matmul in FP8, with a scale for every 128 values of a row or column.

They walk the tiles of the result as the kernels for 16 bits do (`mosaic_kernels`). The tensor cores sum 128 products,
which share their scales; each such partial sum is scaled and added to a float32 total in registers, while the other
warpgroup's products keep the tensor cores busy. Both operands have the summed dim last, as FP8 tensor cores need it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.fp8.formats import E4M3, Quantized
from pallas_kernels.grouped_gemm.groups import group_bounds, group_of_tiles
from pallas_kernels.grouped_gemm.mosaic_kernels import CONSUMERS, TileGrid, run_tiles, store_rows
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import ROWS, Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

STAGES = {1: 6, 2: 4}
"""Stages that fit into shared memory, by the number of 128-column parts of a tile."""
_STORED = 64


class _Buffers(NamedTuple):
    """Shared memory and barriers; the leading dim of operands and scales counts stages, that of `out` consumers.

    `full` has barriers for each 128-column part of a tile.
    """

    left: Ref
    right: Ref
    scale: Ref
    out: Ref
    full: tuple[Ref, ...]
    empty: Ref


@dataclass(frozen=True)
class Fp8Kernels:
    """The grouped matmuls of the forward pass and the gradients in FP8, as Mosaic kernels for Hopper GPUs.

    Groups of rows start at multiples of 128 rows, and D and F are multiples of 128.

    Attributes:
        output: Name of the dtype of the results.
        programs: Programs that run at a time, one on each multiprocessor.
        interpret: True to interpret the kernels on a CPU.
    """

    output: str
    programs: int
    interpret: bool = False

    @functools.partial(jax.jit, static_argnums=0)
    def rows(self, sizes: Int[Array, " G"], *pairs: tuple[Quantized, Quantized]) -> Float[Array, "R N"]:
        """Sum products of rows a [R, K] with the transpose of their group's matrix; rows in no group give 0.

        The matrices of all groups are one array b, [N, G K] or [G N, K]. Its scales are one per 128 x 128 values,
        [K / 128 (or G K / 128), G N / 128 (or N / 128)]; those of a are [K / 128, R].
        """
        a, b = pairs[0]
        rows, depth = a.values.shape
        side_by_side = b.values.shape[1] != depth
        columns = b.values.shape[0] // (1 if side_by_side else sizes.shape[0])
        grid = _grid(rows // BLOCK, columns)
        groups, used = group_of_tiles(sizes, BLOCK, grid.down)
        widths = tuple(a.values.shape[1] // BLOCK for a, _ in pairs)
        body = functools.partial(_rows_body, self, grid, widths, side_by_side)
        arrays = [[a.values for a, _ in pairs], [b.values for _, b in pairs], [a.inverse_scale for a, _ in pairs]]
        scales = [b.inverse_scale for _, b in pairs]
        shared = scales[0] if len(scales) == 1 else jnp.concatenate(scales)
        out = jax.ShapeDtypeStruct((rows, columns), self.output)
        return self._call("fp8_grouped_product", body, grid, grid.items, BLOCK, out)(
            *(array for part in arrays for array in part), shared, groups, used[None]
        )

    @functools.partial(jax.jit, static_argnums=0)
    def matrices(self, sizes: Int[Array, " G"], a: Quantized, b: Quantized) -> Float[Array, "G_D F"]:
        """Sum a b.T over each group's part of the rows: the transposes a [D, R], b [F, R] -> [G D, F].

        Scales of a are one per 128 x 128 values, [R / 128, D / 128], those of b one per 128 values, [R / 128, F].
        """
        depth = a.values.shape[0]
        columns = b.values.shape[0]
        grid = _grid(depth // BLOCK, columns)
        starts, ends = group_bounds(sizes, BLOCK)
        out = jax.ShapeDtypeStruct((sizes.shape[0] * depth, columns), self.output)
        items = sizes.shape[0] * grid.items
        body = functools.partial(_matrices_body, self, grid, items)
        return self._call("fp8_grouped_weights", body, grid, items, grid.width, out)(
            a.values, b.values, a.inverse_scale, b.inverse_scale, starts, ends
        )

    def _call(
        self, name: str, body: Callable, grid: TileGrid, items: int, scales: int, out: jax.ShapeDtypeStruct
    ) -> Callable[..., jax.Array]:
        stages = STAGES[grid.width // BLOCK]
        return pipeline.launch(
            name,
            body,
            consumers=CONSUMERS,
            programs=min(items, self.programs),
            interpret=self.interpret,
            out_type=out,
            scratch_types=_Buffers(
                left=tiled_smem((stages, BLOCK, BLOCK), E4M3),
                right=tiled_smem((stages, grid.width, BLOCK), E4M3),
                scale=plgpu.SMEM((stages, scales), jnp.float32),
                out=tiled_smem((CONSUMERS, ROWS, _STORED), out.dtype),
                full=tuple(
                    plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
                    for arrivals in (3, 1)[: grid.width // BLOCK]
                ),
                empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            ),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )

    def ring(self, grid: TileGrid) -> Ring:
        """Circular shared-memory buffer that passes operands from the loading warpgroup to the computing ones."""
        return Ring(STAGES[grid.width // BLOCK], self.interpret)


def _grid(down: int, columns: int) -> TileGrid:
    width = 2 * BLOCK if columns % (2 * BLOCK) == 0 else BLOCK
    return TileGrid(down, columns // width, width)


def _load(
    ring: Ring, buffers: _Buffers, before: Index, count: Index, copy: Callable[[Index, Callable[..., None]], None]
) -> None:
    """Load `count` slices; copy(index, start) calls start(left, right, scale) with the parts of global memory."""

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)

        def start(left: Ref, right: Ref, scale: Ref) -> None:
            full = [barrier.at[slot] for barrier in buffers.full]
            plgpu.copy_gmem_to_smem(left, buffers.left.at[slot], full[0])
            plgpu.copy_gmem_to_smem(scale, buffers.scale.at[slot], full[0])
            for part, barrier in enumerate(full):
                columns = pl.ds(part * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(right.at[columns], buffers.right.at[slot, columns], barrier)

        copy(index, start)

    ring.produce(before, count, load)


def _sum_scaled(
    ring: Ring,
    buffers: _Buffers,
    before: Index,
    count: Index,
    shared: Callable[[Index], tuple[jax.Array, ...]],
    by_rows: bool,
) -> tuple[jax.Array, ...]:
    """Return the scaled sums of `count` loaded products, float32 [64, 128] in registers for each part of the columns.

    Args:
        ring: Ring of the operands.
        buffers: Where they are.
        before: Number of loads of this program until now.
        count: Number of loads to sum.
        shared: Returns the scales of a load that all values of a part share, one scalar for each part.
        by_rows: True if the scales in shared memory are those of rows, False if they are those of columns.
    """
    own_rows = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)
    parts = buffers.right.shape[1] // BLOCK

    def step(index: jax.Array, state: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]) -> tuple:
        totals, factors = state
        # Read a step ahead: they come from global memory.
        following = shared(jnp.minimum(index + 1, count - 1))
        slot = ring.slot(before + index)
        sums = []
        for part, (total, factor) in enumerate(zip(totals, factors, strict=True)):
            # Waiting for one part after the other also keeps the additions before the next part's product, as the
            # compiler moves nothing past the loop of a wait: the registers have no room for both products.
            plgpu.barrier_wait(buffers.full[part].at[slot])
            columns = pl.ds(part * BLOCK, BLOCK)

            def start(accumulator: Accumulator, columns: Any = columns) -> None:
                right = buffers.right.at[slot, columns].transpose((1, 0))
                accumulator.add(buffers.left.at[slot, own_rows], right)

            product = wgmma.multiply((ROWS, BLOCK), start)
            if by_rows:
                row_scale = wgmma.load_rows(buffers.scale.at[slot, own_rows])
                scale = wgmma.broadcast_row_values(row_scale * factor, product)
            else:
                column_scale = wgmma.load_columns(buffers.scale.at[slot, columns])
                scale = wgmma.broadcast_column_values(column_scale * factor, product)
            sums.append(lax.optimization_barrier(total + product * scale))
        ring.release(slot, buffers.empty)
        return tuple(sums), following

    zeros = tuple(wgmma.zeros(ROWS, BLOCK) for _ in range(parts))
    return lax.fori_loop(0, count, step, (zeros, shared(jnp.int32(0))))[0]


def _store(buffers: _Buffers, sums: Sequence[jax.Array], out: Ref, first_row: Index, first_column: Index) -> None:
    """Store this warpgroup's rows of a tile."""
    rows = pl.ds(first_row + lax.axis_index("warpgroup") * ROWS, ROWS)
    for part, values in enumerate(sums):
        store_rows(buffers.out, values, out.at[rows, pl.ds(first_column + part * BLOCK, BLOCK)])


def _rows_body(kernels: Fp8Kernels, grid: TileGrid, widths: tuple[int, ...], side_by_side: bool, *refs: Any) -> None:
    count = len(widths)
    a, b, a_scale = (refs[start : start + count] for start in range(0, 3 * count, count))
    b_scale, groups, used, out = refs[3 * count : 3 * count + 4]
    buffers = _Buffers(*refs[3 * count + 4 :])
    ring = kernels.ring(grid)
    steps = sum(widths)

    def first_of(group: Index) -> tuple[Index, Index]:
        """Row and column of a group's matrix in b, in blocks of 128."""
        return (0, group * widths[0]) if side_by_side else (group * (grid.across * grid.width // BLOCK), 0)

    def load(item: Index, before: Index) -> Index:
        down, across = grid.place(item)
        slices = jnp.where(down < used[0], steps, 0)
        first_row, first_column = first_of(groups[down])
        rows = pl.ds(down * BLOCK, BLOCK)
        columns = pl.ds(first_row * BLOCK + across * grid.width, grid.width)

        def copy(index: Index, start: Callable[..., None]) -> None:
            before = 0
            for place, width in enumerate(widths):

                def copy_here(place: int = place, before: int = before) -> None:
                    here = index - before
                    right = b[place].at[columns, pl.ds((first_column + here) * BLOCK, BLOCK)]
                    start(a[place].at[rows, pl.ds(here * BLOCK, BLOCK)], right, a_scale[place].at[here, rows])

                if count == 1:
                    copy_here()
                else:
                    pl.when((index >= before) & (index < before + width))(copy_here)
                before += width

        _load(ring, buffers, before, slices, copy)
        return slices

    def compute(item: Index, before: Index) -> Index:
        down, across = grid.place(item)
        slices = jnp.where(down < used[0], steps, 0)
        first_row, first_column = first_of(groups[down])
        parts = grid.width // BLOCK

        def shared(index: Index) -> tuple[jax.Array, ...]:
            place = jnp.maximum(index, 0) + first_column
            return tuple(b_scale[place, first_row + across * parts + part] for part in range(parts))

        sums = _sum_scaled(ring, buffers, before, slices, shared, by_rows=True)
        _store(buffers, sums, out, down * BLOCK, across * grid.width)
        return slices

    run_tiles(kernels.programs, ring, grid.items, buffers.empty, load, compute)


def _matrices_body(kernels: Fp8Kernels, grid: TileGrid, items: int, *refs: Any) -> None:
    a, b, a_scale, b_scale, starts, ends, out, *scratch = refs
    buffers = _Buffers(*scratch)
    ring = kernels.ring(grid)

    def place(item: Index) -> tuple[Index, Index, Index, Index, Index]:
        """Return (group, row of tiles, column of tiles, first block of 128 rows, number of these) of an item."""
        group = lax.div(item, grid.items)
        first = starts[group]
        blocks = lax.div(ends[group] - first, BLOCK)
        return group, *grid.place(item - group * grid.items), lax.div(first, BLOCK), blocks

    def load(item: Index, before: Index) -> Index:
        _, down, across, first, count = place(item)
        columns = pl.ds(across * grid.width, grid.width)

        def copy(index: Index, start: Callable[..., None]) -> None:
            along = pl.ds(pl.multiple_of((first + index) * BLOCK, BLOCK), BLOCK)
            start(a.at[pl.ds(down * BLOCK, BLOCK), along], b.at[columns, along], b_scale.at[first + index, columns])

        _load(ring, buffers, before, count, copy)
        return count

    def compute(item: Index, before: Index) -> Index:
        group, down, across, first, count = place(item)
        last = a_scale.shape[0] - 1

        def shared(index: Index) -> tuple[jax.Array, ...]:
            scale = a_scale[jnp.clip(first + index, 0, last), down]
            return (scale,) * (grid.width // BLOCK)

        sums = _sum_scaled(ring, buffers, before, count, shared, by_rows=False)
        _store(buffers, sums, out, (group * grid.down + down) * BLOCK, across * grid.width)
        return count

    run_tiles(kernels.programs, ring, items, buffers.empty, load, compute)
