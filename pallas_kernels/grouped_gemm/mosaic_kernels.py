"""Persistent Hopper kernels of the grouped matmul and its gradients, with one loading and two computing warpgroups.

Every program computes one tile of the result after the other. The producer streams slices of both operands into a ring
of shared-memory buffers, on into the next tile while this one is still being computed; each consumer sums 64 rows of
the tile in registers. Groups are aligned to whole tiles of rows, so a tile multiplies with one matrix, and every
transfer is a whole tile: no row is masked.

Dims: R rows, G groups, D and F of the matrices; K the dim that a product sums over, M and N the result's rows and
columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_gemm.groups import group_bounds, group_of_tiles
from pallas_kernels.hopper import pipeline, scheduler
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.scheduler import TileOrder
from pallas_kernels.hopper.wgmma import ROWS, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

CONSUMERS = 2
"""Warpgroups that compute, 64 rows of a tile each."""
SLICE = 64
"""Part of K that a buffer holds: with 16-bit operands 128 bytes, one swizzle."""
STAGES = 4
PANEL = 16
"""Rows of tiles whose results are computed together, so that both operands stay in the L2 cache."""
_STORED = 128
"""Columns of the result that are stored at a time."""
_COLUMNS = (256, 192, 128, 64)


class _Buffers(NamedTuple):
    """Shared memory and barriers of a kernel.

    The leading dim of the operands counts stages, that of `out` consumers.
    """

    left: Ref
    right: Ref
    out: Ref
    full: Ref
    empty: Ref


@dataclass(frozen=True)
class Kernels:
    """The grouped matmuls of the forward pass and the gradients, as Mosaic kernels for Hopper GPUs.

    Attributes:
        tile: Rows of a tile.
        programs: Programs that run at a time, one on each multiprocessor.
        interpret: True to interpret the kernels on a CPU.
    """

    tile: int
    programs: int
    interpret: bool = False

    @property
    def ring(self) -> Ring:
        """Circular shared-memory buffer that passes operands from the loading warpgroup to the computing ones."""
        return Ring(STAGES, self.interpret)

    def rows(
        self, x: Float[Array, "R K"], weights: Float[Array, "G D F"], sizes: Int[Array, " G"], transposed: bool
    ) -> Float[Array, "R N"]:
        """Multiply each row with its group's matrix: [R, D] -> [R, F], or transposed [R, F] -> [R, D]."""
        tiles = x.shape[0] // self.tile
        columns = weights.shape[1 if transposed else 2]
        width = _tile_columns(columns)
        groups, used = group_of_tiles(sizes, self.tile, tiles)
        shape = TileGrid(tiles, columns // width, width)
        right = (width, SLICE) if transposed else (SLICE, width)
        return self._call(
            "grouped_matmul_transposed" if transposed else "grouped_matmul",
            partial(_rows_body, self, shape, transposed),
            jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
            shape.items,
            _scratch((ROWS, SLICE), right, width, x.dtype),
            (x, weights, groups, used[None]),
        )

    def matrices(
        self, x: Float[Array, "R D"], y: Float[Array, "R F"], sizes: Int[Array, " G"]
    ) -> Float[Array, "G D F"]:
        """Sum x.T @ y over the rows of each group, the gradient of the matrices: [R, D], [R, F] -> [G, D, F]."""
        groups = sizes.shape[0]
        depth = x.shape[1]
        columns = y.shape[1]
        width = _tile_columns(columns)
        starts, ends = group_bounds(sizes, self.tile)
        shape = TileGrid(pl.cdiv(depth, self.tile), columns // width, width)
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
        kernel = pipeline.launch(
            name,
            body,
            consumers=CONSUMERS,
            programs=min(items, self.programs),
            interpret=self.interpret,
            out_type=out,
            scratch_types=scratch,
        )
        return kernel(inputs)


class TileGrid(NamedTuple):
    """The grid of tiles of a matmul's result: how many down and across, and the width of a tile in columns."""

    down: int
    across: int
    width: int

    @property
    def items(self) -> int:
        return self.down * self.across

    def place(self, index: Index) -> tuple[Index, Index]:
        """Return the (row, column) in the grid of the `index`-th tile to be computed."""
        return TileOrder(self.down, self.across, PANEL).tile(index)[1:]


def _tile_columns(columns: int) -> int:
    return next(width for width in _COLUMNS if columns % width == 0)


def _stored_columns(width: int) -> int:
    return next(columns for columns in (_STORED, SLICE) if width % columns == 0)


def _scratch(left: tuple[int, int], right: tuple[int, int], width: int, dtype: DTypeLike) -> _Buffers:
    return _Buffers(
        left=tiled_smem((STAGES, CONSUMERS, *left), dtype),
        right=tiled_smem((STAGES, *right), dtype),
        out=tiled_smem((CONSUMERS, ROWS, _stored_columns(width)), dtype),
        full=plgpu.Barrier(num_arrivals=CONSUMERS + 1, num_barriers=STAGES),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
    )


def run_tiles(
    programs: int,
    ring: Ring,
    total: int,
    empty: Ref,
    load: Callable[[Index, Index], Index],
    compute: Callable[[Index, Index], Index],
) -> None:
    """Loop over `total` tiles: call load(item, before) in the loading warpgroup, compute(item, before) in the others.

    Both return how many slices the item has; `before` counts those of the items before it.
    """

    def slices(visit: Callable[[Index, Index], Index]) -> Index:
        def step(_, item, before):
            return before + visit(item, before)

        return scheduler.deal(total, min(total, programs), step, jnp.int32(0))[1]

    def consume() -> None:
        slices(compute)
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        ring.drain(slices(load), empty)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load_slices(
    kernels: Kernels, buffers: _Buffers, before: Index, count: Index, sources: Callable[[Index], tuple[list[Ref], Ref]]
) -> None:
    """Load `count` slices of both operands; sources(index) returns ([left slice of each consumer], right slice)."""

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        lefts, right = sources(index)
        for consumer, left in enumerate(lefts):
            plgpu.copy_gmem_to_smem(left, buffers.left.at[slot, consumer], buffers.full.at[slot])
        plgpu.copy_gmem_to_smem(right, buffers.right.at[slot], buffers.full.at[slot])

    kernels.ring.produce(before, count, load)


def _sum_slices(
    kernels: Kernels,
    buffers: _Buffers,
    before: Index,
    count: Index,
    width: int,
    operands: Callable[[Ref, Ref], tuple[Ref, Ref]],
) -> jax.Array:
    """Return the sum of the products of `count` loaded pairs of slices, [64, width] float32 in registers."""
    warpgroup = lax.axis_index("warpgroup")

    def of_slot(slot: Index) -> tuple[Ref, Ref]:
        return operands(buffers.left.at[slot, warpgroup], buffers.right.at[slot])

    barriers = (lambda slot: buffers.full.at[slot]), buffers.empty
    return kernels.ring.sum_products(before, count, (ROWS, width), barriers, of_slot)


def store_rows(buffer: Ref, values: jax.Array, out: Ref) -> None:
    """Store a warpgroup's result [64, width] to the same shape in global memory, some columns at a time.

    `buffer` is shared memory [consumers, 64, columns], in which each warpgroup has a part.
    """
    staging = buffer.at[lax.axis_index("warpgroup")]
    columns = staging.shape[1]
    values = values.astype(out.dtype)
    for first in range(0, values.shape[1], columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = values[:, first : first + columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out.at[:, pl.ds(first, columns)])


def _rows_body(
    kernels: Kernels, shape: TileGrid, transposed: bool, inputs: tuple[Ref, ...], out: Ref, *scratch: Ref
) -> None:
    x, weights, groups, used = inputs
    buffers = _Buffers(*scratch)
    slices = x.shape[1] // SLICE

    def load(item: Index, before: Index) -> Index:
        down, across = shape.place(item)
        count = jnp.where(down < used[0], slices, 0)
        group = groups[down]
        columns = pl.ds(across * shape.width, shape.width)

        def sources(index: Index) -> tuple[list[Ref], Ref]:
            depth = pl.ds(index * SLICE, SLICE)
            rows = [pl.ds(down * kernels.tile + part * ROWS, ROWS) for part in range(CONSUMERS)]
            right = weights.at[group, columns, depth] if transposed else weights.at[group, depth, columns]
            return [x.at[part, depth] for part in rows], right

        _load_slices(kernels, buffers, before, count, sources)
        return count

    def compute(item: Index, before: Index) -> Index:
        down, across = shape.place(item)
        count = jnp.where(down < used[0], slices, 0)

        def operands(left: Ref, right: Ref) -> tuple[Ref, Ref]:
            return left, right.transpose((1, 0)) if transposed else right

        sums = _sum_slices(kernels, buffers, before, count, shape.width, operands)
        rows = pl.ds(down * kernels.tile + lax.axis_index("warpgroup") * ROWS, ROWS)
        store_rows(buffers.out, sums, out.at[rows, pl.ds(across * shape.width, shape.width)])
        return count

    run_tiles(kernels.programs, kernels.ring, shape.items, buffers.empty, load, compute)


def _matrices_body(kernels: Kernels, shape: TileGrid, inputs: tuple[Ref, ...], out: Ref, *scratch: Ref) -> None:
    x, y, starts, ends = inputs
    buffers = _Buffers(*scratch)
    last = x.shape[1] - ROWS

    def place(item: Index) -> tuple[Index, Index, Index]:
        group = lax.div(item, shape.items)
        return group, *shape.place(item - group * shape.items)

    def load(item: Index, before: Index) -> Index:
        group, down, across = place(item)
        first = starts[group]
        count = lax.div(ends[group] - first, SLICE)

        def sources(index: Index) -> tuple[list[Ref], Ref]:
            rows = pl.ds(pl.multiple_of(first + index * SLICE, SLICE), SLICE)
            # The second half of the last tile may lie beyond the end; it is not stored.
            depths = [pl.ds(jnp.minimum(down * kernels.tile + part * ROWS, last), ROWS) for part in range(CONSUMERS)]
            return [x.at[rows, depth] for depth in depths], y.at[rows, pl.ds(across * shape.width, shape.width)]

        _load_slices(kernels, buffers, before, count, sources)
        return count

    def compute(item: Index, before: Index) -> Index:
        group, down, across = place(item)
        count = lax.div(ends[group] - starts[group], SLICE)
        sums = _sum_slices(
            kernels, buffers, before, count, shape.width, lambda left, right: (left.transpose((1, 0)), right)
        )
        depth = down * kernels.tile + lax.axis_index("warpgroup") * ROWS

        @pl.when(depth <= last)
        def _():
            columns = pl.ds(across * shape.width, shape.width)
            store_rows(buffers.out, sums, out.at[group, pl.ds(depth, ROWS), columns])

        return count

    total = out.shape[0] * shape.items
    run_tiles(kernels.programs, kernels.ring, total, buffers.empty, load, compute)
