"""The block-scaled FP8 product for Hopper: wgmma in E4M3, one producer and two consumer warpgroups.

The tensor cores sum 128 products of a row and a column, which share their scales; each such partial sum is scaled and
added to a float32 total in registers. While one warpgroup does that, the other's products keep the tensor cores busy.
That is why a consumer has its own loop, and not `Ring.sum_products`, whose accumulator stays in the tensor cores'
registers over all steps. One program runs on each multiprocessor and computes one tile of the result after the other,
few rows of tiles at a time, so that what they read stays in the L2 cache.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fp8.formats import E4M3, Quantized
from pallas_kernels.hopper import pipeline, scheduler, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.scheduler import Tile, TileOrder
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

BLOCK = 128
CONSUMERS = 2
HALF_ROWS = CONSUMERS * ROWS
"""Rows of a tile that all computing warpgroups compute at a time, see `ScaledProduct.halves`."""
_STAGES = {1: 5, 2: 3}
"""Stages that fit into shared memory next to the result, by `ScaledProduct.halves`."""
_STORE_COLUMNS = 64
_TILE_ROWS_TOGETHER = 8


@dataclass(frozen=True)
class ScaledProduct:
    """Compile-time constants of a sum of block-scaled FP8 products, each a [rows, width] @ b [columns, width].T.

    Attributes:
        rows: Rows of each a.
        columns: Rows of each b, the columns of the result.
        widths: Dim that is summed, of each product.
        halves: 128-row parts of the tile that are computed one after the other, 64 rows by each warpgroup.
        columns_scaled: True if every row of b has its own scales, False if every 128 rows share them.
        transposed: True to store the transpose of the result, [columns, rows].
        output: Name of the dtype of the result.
        programs: Programs that run at a time.
        cluster: Number of programs that compute tiles side by side, and load the rows of a that they share only once.
        interpret: True to interpret the kernel on a CPU.
    """

    rows: int
    columns: int
    widths: tuple[int, ...]
    halves: int
    columns_scaled: bool
    transposed: bool
    output: str
    programs: int
    cluster: int = 1
    interpret: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of 128 values in a program's loop over the contracted dim."""
        return sum(self.widths) // BLOCK

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile of the result."""
        return self.halves * HALF_ROWS

    @property
    def ring(self) -> Ring:
        """Ring of shared-memory buffers for the operands and their scales."""
        return Ring(_STAGES[self.halves], self.interpret)

    @property
    def order(self) -> TileOrder:
        """Order in which programs compute the tiles of the result."""
        rows = self.rows // self.tile_rows
        columns = self.columns // BLOCK
        programs = min(self.programs, rows * columns) // self.cluster
        return TileOrder(rows, columns, _TILE_ROWS_TOGETHER, programs, cluster=self.cluster, side_by_side=True)


class _Inputs(NamedTuple):
    """Operands and scales in global memory, an array for each product; one of `b_scale` if rows of b share scales."""

    a: tuple[Ref, ...]
    b: tuple[Ref, ...]
    a_scale: tuple[Ref, ...]
    b_scale: tuple[Ref, ...]


class _Buffers(NamedTuple):
    """Shared memory for operands, scales and result, and the barriers that guard it.

    `full` has barriers for each half; the leading dims of `out` are those of parts and columns.
    """

    a: Ref
    b: Ref
    a_scale: Ref
    b_scale: Ref | None
    out: Ref
    full: tuple[Ref, ...]
    empty: Ref


@functools.partial(jax.jit, static_argnums=0)
def product(spec: ScaledProduct, *pairs: tuple[Quantized, Quantized]) -> Float[Array, "M N"]:
    """Sum the products of each FP8 a [M, K] with its b [N, K] transposed; the result may be stored transposed.

    Scales are [K / 128, M] and [K / 128, N (or N / 128)]. It is jitted, so that a train step traces and lowers each
    shape once and not once a layer.
    """
    stages = spec.ring.stages
    count = len(pairs)
    part = (BLOCK, ROWS) if spec.transposed else (ROWS, _STORE_COLUMNS)
    shape = (spec.columns, spec.rows) if spec.transposed else (spec.rows, spec.columns)
    kernel = pipeline.launch(
        "fp8_block_product",
        functools.partial(_body, spec),
        consumers=CONSUMERS,
        programs=spec.order.programs * spec.cluster,
        cluster=spec.cluster,
        interpret=spec.interpret,
        out_type=jax.ShapeDtypeStruct(shape, spec.output),
        scratch_types=_Buffers(
            a=wgmma.tiled_smem((stages, spec.halves, HALF_ROWS, BLOCK), E4M3),
            b=wgmma.tiled_smem((stages, BLOCK, BLOCK), E4M3),
            a_scale=plgpu.SMEM((stages, spec.halves, HALF_ROWS), jnp.float32),
            b_scale=plgpu.SMEM((stages, BLOCK), jnp.float32) if spec.columns_scaled else None,
            out=wgmma.tiled_smem((CONSUMERS, spec.halves, ROWS * BLOCK // math.prod(part), *part), spec.output),
            full=tuple(
                plgpu.Barrier(num_arrivals=2 + of_b, num_barriers=stages)
                for of_b in (1 + spec.columns_scaled, 0)[: spec.halves]
            ),
            empty=pipeline.empty_barriers(CONSUMERS, stages, spec.cluster),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = [[a.values for a, _ in pairs], [b.values for _, b in pairs], [a.inverse_scale for a, _ in pairs]]
    scales = [b.inverse_scale for _, b in pairs]
    scales = scales if spec.columns_scaled or count == 1 else [jnp.concatenate(scales)]
    # Without the barrier XLA computes a result that a scan stacks twice: once more, right into the stacked array.
    return lax.optimization_barrier(kernel(*itertools.chain(*arrays, scales)))


def _body(spec: ScaledProduct, *refs: Any) -> None:
    count = len(spec.widths)
    a, b, a_scale = (refs[start : start + count] for start in range(0, 3 * count, count))
    scales = count if spec.columns_scaled else 1
    (*b_scale, out), scratch = refs[3 * count : 3 * count + scales + 1], refs[3 * count + scales + 1 :]
    inputs = _Inputs(a, b, a_scale, tuple(b_scale))
    buffers = _Buffers(*scratch)

    def consume() -> None:
        compute = functools.partial(_compute, spec, b_scale[0], out, buffers)
        scheduler.follow_tiles(spec.order, None, lambda number, tile, _: compute(number, tile))
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        # One warp is enough, and need not wait for three others at each copy.
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, spec, inputs, buffers)
                tiles = scheduler.claim_tiles(spec.order, None, None, load)
                spec.ring.drain(tiles * spec.steps, buffers.empty)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load(spec: ScaledProduct, inputs: _Inputs, buffers: _Buffers, number: Index, tile: Tile) -> None:
    """Load both operands of a tile and their scales, step by step, into the ring of shared-memory buffers."""

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        first = 0
        for place, width in enumerate(spec.widths):
            last = first + width // BLOCK
            copy = functools.partial(_copy, spec, inputs, buffers, tile, slot, place)
            if len(spec.widths) == 1:
                copy(index)
            else:
                pl.when((index >= first) & (index < last))(functools.partial(copy, index - first))
            first = last

    spec.ring.produce(number * spec.steps, spec.steps, load)


def _copy(
    spec: ScaledProduct, inputs: _Inputs, buffers: _Buffers, tile: Tile, slot: Index, place: int, index: Index
) -> None:
    """Start to copy block `index` of the operands of product number `place` to the buffers of a slot."""
    full = [barrier.at[slot] for barrier in buffers.full]
    along = pl.ds(index * BLOCK, BLOCK)
    columns = pl.ds(tile.column * BLOCK, BLOCK)
    shared = "cluster" if spec.cluster > 1 else None
    plgpu.copy_gmem_to_smem(inputs.b[place].at[columns, along], buffers.b.at[slot], full[0])
    if buffers.b_scale is not None:
        plgpu.copy_gmem_to_smem(inputs.b_scale[place].at[index, columns], buffers.b_scale.at[slot], full[0])
    for half in range(spec.halves):
        rows = pl.ds(tile.row * spec.tile_rows + half * HALF_ROWS, HALF_ROWS)
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=full[half], collective_axes=shared)
        copy(inputs.a[place].at[rows, along], buffers.a.at[slot, half])
        copy(inputs.a_scale[place].at[index, rows], buffers.a_scale.at[slot, half])


def _compute(spec: ScaledProduct, b_scale: Ref, out: Ref, buffers: _Buffers, number: Index, tile: Tile) -> None:
    """Compute this warpgroup's rows of one tile of the result, and store them to global memory."""
    warpgroup = lax.axis_index("warpgroup")
    own_rows = pl.ds(warpgroup * ROWS, ROWS)

    def shared_scale(index: Index) -> jax.Array:
        return jnp.float32(1) if spec.columns_scaled else b_scale[jnp.minimum(index, spec.steps - 1), tile.column]

    def step(index: jax.Array, state: tuple[tuple[jax.Array, ...], jax.Array]) -> tuple:
        totals, factor = state
        # Read a step ahead: it comes from global memory.
        following = shared_scale(index + 1)
        slot = spec.ring.slot(number * spec.steps + index)
        sums = []
        for half, total in enumerate(totals):
            # Waiting for one half after the other also keeps the additions before the next half's product, as the
            # compiler moves nothing past the loop of a wait: the registers have no room for both halves' sums.
            plgpu.barrier_wait(buffers.full[half].at[slot])
            scale = wgmma.load_rows(buffers.a_scale.at[slot, half, own_rows]) * factor

            def start(accumulator: Accumulator, half: int = half) -> None:
                accumulator.add(buffers.a.at[slot, half, own_rows], buffers.b.at[slot].transpose((1, 0)))

            partial = wgmma.multiply((ROWS, BLOCK), start)
            if buffers.b_scale is not None:
                partial = partial * wgmma.broadcast_column_values(wgmma.load_columns(buffers.b_scale.at[slot]), partial)
            sums.append(lax.optimization_barrier(total + partial * wgmma.broadcast_row_values(scale, partial)))
        spec.ring.release(slot, buffers.empty)
        return tuple(sums), following

    zeros = tuple(wgmma.zeros(ROWS, BLOCK) for _ in range(spec.halves))
    totals, _ = lax.fori_loop(0, spec.steps, step, (zeros, shared_scale(jnp.int32(0))))
    # Rounded together, they leave room for the registers that the stores need.
    rounded = lax.optimization_barrier(tuple(total.astype(out.dtype) for total in totals))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for half, part in enumerate(rounded):
        first = tile.row * spec.tile_rows + half * HALF_ROWS + warpgroup * ROWS
        store = _store_transposed if spec.transposed else _store
        store(out, buffers.out.at[warpgroup, half], part, first, tile.column)


def _store(out: Ref, buffer: Ref, part: jax.Array, first: Index, column: Index) -> None:
    """Copy 64 rows of a result tile from registers through shared memory to global memory, some columns at a time."""
    for index in range(BLOCK // _STORE_COLUMNS):
        start = index * _STORE_COLUMNS
        buffer[index] = part[:, start : start + _STORE_COLUMNS]
        plgpu.commit_smem()
        columns = pl.ds(column * BLOCK + start, _STORE_COLUMNS)
        plgpu.copy_smem_to_gmem(buffer.at[index], out.at[pl.ds(first, ROWS), columns])


def _store_transposed(out: Ref, buffer: Ref, part: jax.Array, first: Index, column: Index) -> None:
    """Copy the transpose of 64 rows of a result tile through shared memory to 64 columns of the stored result."""
    buffer.at[0].transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer.at[0], out.at[pl.ds(column * BLOCK, BLOCK), pl.ds(first, ROWS)])
