"""The three products of the grouped matmul for Hopper: wgmma, TMA, a warpgroup that loads and two that compute.

One program runs on each multiprocessor and takes tiles of the result in turn. Its loading warpgroup streams the slices
of both operands into a ring of shared memory buffers, on into the next tile while this one is still being computed; the
other two keep 64 rows of the tile each in registers. Groups are aligned to whole tiles of rows, so a tile has one
matrix, and every transfer is a whole tile: no row is masked.

Dims: R rows, G groups, D and F of the matrices; K what a product sums over, M and N its result's rows and columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm.groups import group_bounds, group_of_tiles
from pallas_kernels.mosaic_api import pl, plgpu

WARPGROUPS = 2
ROWS = 64  # of a warpgroup: what one wgmma gives
SLICE = 64  # of K that a buffer holds: 128 bytes, one swizzle
STAGES = 4
PANEL = 16  # tiles of rows whose results are computed together, so that both operands stay in the L2 cache
_STORED = 128  # columns of the result that are stored at a time
_COLUMNS = (256, 192, 128, 64)


class _Buffers(NamedTuple):
    """Shared memory and its barriers; the leading dim of the operands counts stages, that of `out` warpgroups."""

    left: Any
    right: Any
    out: Any
    full: Any
    empty: Any


@dataclass(frozen=True)
class Kernels:
    """`products.Products` on Hopper.

    Attributes:
        tile: rows of a tile.
        programs: that run at a time, one on each multiprocessor.
        interpret: whether the kernels are interpreted on a CPU.
    """

    tile: int
    programs: int
    interpret: bool = False

    def rows(self, x: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        """[R, D] -> [R, F], or [R, F] -> [R, D]."""
        tiles = x.shape[0] // self.tile
        columns = weights.shape[1 if transposed else 2]
        width = _tile_columns(columns)
        groups, used = group_of_tiles(sizes, self.tile, tiles)
        shape = _Shape(tiles, columns // width, width)
        right = (width, SLICE) if transposed else (SLICE, width)
        return self._call(
            "grouped_matmul_transposed" if transposed else "grouped_matmul",
            partial(_rows_body, self, shape, transposed),
            jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
            shape.items,
            _scratch((ROWS, SLICE), right, width, x.dtype),
            (x, weights, groups, used[None]),
        )

    def matrices(self, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        """[R, D], [R, F] -> [G, D, F]."""
        groups, depth, columns = sizes.shape[0], x.shape[1], y.shape[1]
        width = _tile_columns(columns)
        starts, ends = group_bounds(sizes, self.tile)
        shape = _Shape(depth // self.tile, columns // width, width)
        return self._call(
            "grouped_matmul_weights",
            partial(_matrices_body, self, shape),
            jax.ShapeDtypeStruct((groups, depth, columns), x.dtype),
            groups * shape.items,
            _scratch((SLICE, ROWS), (SLICE, width), width, x.dtype),
            (x, y, starts, ends),
        )

    def _call(
        self, name: str, body: Callable, out: jax.ShapeDtypeStruct, items: int, scratch: _Buffers, inputs: tuple
    ) -> jax.Array:
        return plgpu.kernel(
            body,
            kernel_name=name,
            out_type=out,
            grid=(min(items, self.programs),),
            grid_names=("program",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
        )(inputs)


class _Shape(NamedTuple):
    """How a result is cut into tiles: numbers of tiles down and across, columns of one."""

    down: int
    across: int
    width: int

    @property
    def items(self) -> int:
        return self.down * self.across

    def place(self, index: Any) -> tuple[Any, Any]:
        """(row, column) of a tile: panels of `PANEL` rows of tiles, each column by column."""
        panel = lax.div(index, PANEL * self.across)
        rest = index - panel * (PANEL * self.across)
        high = jnp.minimum(self.down - panel * PANEL, PANEL)
        across = lax.div(rest, high)
        return panel * PANEL + rest - across * high, across


def _tile_columns(columns: int) -> int:
    return next(width for width in _COLUMNS if columns % width == 0)


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(min(shape[-1], SLICE) * bits)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    )


def _scratch(left: tuple[int, int], right: tuple[int, int], width: int, dtype: Any) -> _Buffers:
    return _Buffers(
        left=_tiled((STAGES, WARPGROUPS, *left), dtype),
        right=_tiled((STAGES, *right), dtype),
        out=_tiled((WARPGROUPS, ROWS, _stored_columns(width)), dtype),
        full=plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=STAGES),
        empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
    )


def _stored_columns(width: int) -> int:
    return next(columns for columns in (_STORED, SLICE) if width % columns == 0)


def _run(kernels: Kernels, count: int, buffers: _Buffers, load: Callable, compute: Callable) -> None:
    """Calls load(item, before) in one warpgroup and compute(item, before) in the others, for this program's items.

    Both return how many slices the item has; `before` counts those of the items before it.
    """
    program = lax.axis_index("program")
    programs = min(count, kernels.programs)
    items = lax.div(count - 1 - program, programs) + 1
    warpgroup = lax.axis_index("warpgroup")

    def each(visit: Callable) -> Any:
        def step(number: jax.Array, before: jax.Array) -> jax.Array:
            return before + visit(number * programs + program, before)

        return lax.fori_loop(0, items, step, jnp.int32(0))

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        each(compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        slices = each(load)

        def wait(index: jax.Array, _: None) -> None:
            plgpu.barrier_wait(buffers.empty.at[lax.rem(index, STAGES)])

        # No barrier may end half observed.
        lax.fori_loop(jnp.maximum(slices - STAGES, 0), slices, wait, None)


def _load_slices(buffers: _Buffers, before: Any, count: Any, sources: Callable) -> None:
    """Fills a buffer after the other; sources(index) gives each warpgroup's left operand, and the right one."""

    def step(index: jax.Array, _: None) -> None:
        slot = lax.rem(before + index, STAGES)

        @pl.when(before + index >= STAGES)
        def _():
            plgpu.barrier_wait(buffers.empty.at[slot])

        lefts, right = sources(index)
        for warpgroup, left in enumerate(lefts):
            plgpu.copy_gmem_to_smem(left, buffers.left.at[slot, warpgroup], buffers.full.at[slot])
        plgpu.copy_gmem_to_smem(right, buffers.right.at[slot], buffers.full.at[slot])

    lax.fori_loop(0, count, step, None)


def _sum_slices(kernels: Kernels, buffers: _Buffers, before: Any, count: Any, width: int, operands: Callable) -> Any:
    """The sum of the products of `count` buffers, [64, width] float32 in registers."""
    warpgroup = lax.axis_index("warpgroup")

    def release(index: Any) -> None:
        if kernels.interpret:
            plgpu.commit_smem()  # Interpret mode asks for it; hardware has read a buffer when its product is done.
        plgpu.barrier_arrive(buffers.empty.at[lax.rem(index, STAGES)])

    def scoped(sums: Any) -> jax.Array:
        def step(index: jax.Array, _: None) -> None:
            slot = lax.rem(before + index, STAGES)
            plgpu.barrier_wait(buffers.full.at[slot])
            plgpu.wgmma(sums, *operands(buffers.left.at[slot, warpgroup], buffers.right.at[slot]))
            plgpu.wgmma_wait(1)  # all but this one

            @pl.when(index > 0)
            def _():
                release(before + index - 1)

        lax.fori_loop(0, count, step, None)
        plgpu.wgmma_wait(0)

        @pl.when(count > 0)
        def _():
            release(before + count - 1)

        return sums[...]

    return pl.run_scoped(scoped, plgpu.ACC((ROWS, width), jnp.float32))


def _store(buffers: _Buffers, values: jax.Array, out: Any) -> None:
    """[64, width] values into `out` of that shape in global memory, some columns at a time."""
    staging = buffers.out.at[lax.axis_index("warpgroup")]
    columns = _stored_columns(values.shape[1])
    values = values.astype(out.dtype)
    for first in range(0, values.shape[1], columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = values[:, first : first + columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out.at[:, pl.ds(first, columns)])


def _rows_body(kernels: Kernels, shape: _Shape, transposed: bool, inputs: tuple, out: Any, *scratch: Any) -> None:
    x, weights, groups, used = inputs
    buffers = _Buffers(*scratch)
    slices = x.shape[1] // SLICE

    def load(item: Any, before: Any) -> Any:
        down, across = shape.place(item)
        count = jnp.where(down < used[0], slices, 0)
        group = groups[down]
        columns = pl.ds(across * shape.width, shape.width)

        def sources(index: Any) -> tuple:
            depth = pl.ds(index * SLICE, SLICE)
            rows = [pl.ds(down * kernels.tile + part * ROWS, ROWS) for part in range(WARPGROUPS)]
            right = weights.at[group, columns, depth] if transposed else weights.at[group, depth, columns]
            return [x.at[part, depth] for part in rows], right

        _load_slices(buffers, before, count, sources)
        return count

    def compute(item: Any, before: Any) -> Any:
        down, across = shape.place(item)
        count = jnp.where(down < used[0], slices, 0)

        def operands(left: Any, right: Any) -> tuple:
            return left, right.transpose((1, 0)) if transposed else right

        sums = _sum_slices(kernels, buffers, before, count, shape.width, operands)
        rows = pl.ds(down * kernels.tile + lax.axis_index("warpgroup") * ROWS, ROWS)
        _store(buffers, sums, out.at[rows, pl.ds(across * shape.width, shape.width)])
        return count

    _run(kernels, shape.items, buffers, load, compute)


def _matrices_body(kernels: Kernels, shape: _Shape, inputs: tuple, out: Any, *scratch: Any) -> None:
    x, y, starts, ends = inputs
    buffers = _Buffers(*scratch)

    def place(item: Any) -> tuple:
        group = lax.div(item, shape.items)
        return group, *shape.place(item - group * shape.items)

    def load(item: Any, before: Any) -> Any:
        group, down, across = place(item)
        first = starts[group]
        count = lax.div(ends[group] - first, SLICE)

        def sources(index: Any) -> tuple:
            rows = pl.ds(pl.multiple_of(first + index * SLICE, SLICE), SLICE)
            depths = [pl.ds(down * kernels.tile + part * ROWS, ROWS) for part in range(WARPGROUPS)]
            return [x.at[rows, depth] for depth in depths], y.at[rows, pl.ds(across * shape.width, shape.width)]

        _load_slices(buffers, before, count, sources)
        return count

    def compute(item: Any, before: Any) -> Any:
        group, down, across = place(item)
        count = lax.div(ends[group] - starts[group], SLICE)
        sums = _sum_slices(
            kernels, buffers, before, count, shape.width, lambda left, right: (left.transpose((1, 0)), right)
        )
        depth = pl.ds(down * kernels.tile + lax.axis_index("warpgroup") * ROWS, ROWS)
        _store(buffers, sums, out.at[group, depth, pl.ds(across * shape.width, shape.width)])
        return count

    _run(kernels, out.shape[0] * shape.items, buffers, load, compute)
