"""The block-scaled FP8 product for Hopper: wgmma in E4M3, TMA, one warpgroup that loads and two that compute.

The tensor cores sum 128 products of a row and a column, which share their scales; each such partial sum is scaled and
added to a float32 total in registers. While one warpgroup does that, the other's products keep the tensor cores busy.
One program runs on each multiprocessor and takes tiles of the result in turn, few rows of tiles at a time, so that what
they read stays in the L2 cache.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import mosaic_pieces as pieces
from pallas_kernels.fp8.formats import E4M3, Quantized
from pallas_kernels.mosaic_api import pl, plgpu

BLOCK = 128
ROWS = 64
"""Of one wgmma."""
WARPGROUPS = 2
_STAGES = {1: 5, 2: 3}
"""By halves: what shared memory has room for beside the result."""
_STORE_COLUMNS = 64
_TILE_ROWS_TOGETHER = 8


@dataclass(frozen=True)
class Config:
    """Static description of one product: a [rows, width] @ b [columns, width].T.

    Attributes:
        halves: 64-row parts of the tile that each warpgroup computes one after the other.
        columns_scaled: whether every row of b has its own scales (else every 128 rows share them).
        programs: to start at most; each takes every so manieth tile.
    """

    rows: int
    columns: int
    width: int
    halves: int
    columns_scaled: bool
    output: str
    programs: int
    interpret: bool = False

    @property
    def stages(self) -> int:
        """Steps along the summed dim that are in flight from global memory."""
        return _STAGES[self.halves]

    @property
    def parts(self) -> int:
        """64-row parts of a tile."""
        return WARPGROUPS * self.halves

    @property
    def tiles(self) -> tuple[int, int]:
        return self.rows // (self.parts * ROWS), self.columns // BLOCK


class _Buffers(NamedTuple):
    a: Any
    b: Any
    a_scale: Any
    b_scale: Any
    out: Any
    full: Any
    empty: Any


@functools.partial(jax.jit, static_argnums=0)
def product(config: Config, a: Quantized, b: Quantized) -> jax.Array:
    """a [rows, width] @ b [columns, width].T with scales [width / 128, rows] and [width / 128, columns (/ 128)].

    Jitted, so that a step traces and lowers each shape once and not once a layer.
    """

    def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
        swizzle = 128
        transforms = (
            plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
            plgpu.SwizzleTransform(swizzle),
        )
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    kernel = plgpu.kernel(
        functools.partial(_body, config),
        kernel_name="fp8_block_product",
        out_type=jax.ShapeDtypeStruct((config.rows, config.columns), config.output),
        grid=(min(config.programs, config.tiles[0] * config.tiles[1]),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=_Buffers(
            a=tiled((config.stages, config.parts, ROWS, BLOCK), E4M3),
            b=tiled((config.stages, BLOCK, BLOCK), E4M3),
            a_scale=plgpu.SMEM((config.stages, config.parts, ROWS), jnp.float32),
            b_scale=plgpu.SMEM((config.stages, BLOCK), jnp.float32) if config.columns_scaled else None,
            out=tiled((WARPGROUPS, config.halves, BLOCK // _STORE_COLUMNS, ROWS, _STORE_COLUMNS), config.output),
            full=tuple(
                plgpu.Barrier(num_arrivals=2 * WARPGROUPS + beside, num_barriers=config.stages)
                for beside in (1 + config.columns_scaled, 0)[: config.halves]
            ),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if config.interpret else None,
    )
    # Without the barrier XLA computes a result twice that a scan keeps: once more right into what is kept.
    return lax.optimization_barrier(kernel(a.values, b.values, a.inverse_scale, b.inverse_scale))


def _body(config: Config, a: Any, b: Any, a_scale: Any, b_scale: Any, out: Any, *scratch: Any) -> None:
    buffers = _Buffers(*scratch)
    warpgroup = lax.axis_index("warpgroup")
    steps = config.width // BLOCK

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _for_each_tile(config, functools.partial(_compute, config, b_scale, out, buffers))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        tiles = _for_each_tile(config, functools.partial(_load, config, (a, b, a_scale, b_scale), buffers))
        pieces.drain(config.stages, tiles * steps, buffers.empty)


def _for_each_tile(config: Config, visit: Any) -> Any:
    """Calls visit(number, row, column) for this program's tiles of the result; returns how many they were."""
    tile_rows, tile_columns = config.tiles
    programs = min(config.programs, tile_rows * tile_columns)
    program = lax.axis_index("program")
    count = lax.div(tile_rows * tile_columns - 1 - program, programs) + 1

    def step(number: jax.Array, _: None) -> None:
        index = number * programs + program
        band = lax.div(index, _TILE_ROWS_TOGETHER * tile_columns)
        first = band * _TILE_ROWS_TOGETHER
        height = jnp.minimum(tile_rows - first, _TILE_ROWS_TOGETHER)
        within = index - band * (_TILE_ROWS_TOGETHER * tile_columns)
        visit(number, first + lax.rem(within, height), lax.div(within, height))

    lax.fori_loop(0, count, step, None)
    return count


def _load(config: Config, inputs: tuple[Any, ...], buffers: _Buffers, number: Any, row: Any, column: Any) -> None:
    a, b, a_scale, b_scale = inputs
    steps = config.width // BLOCK

    def step(index: jax.Array, _: None) -> None:
        count = number * steps + index
        slot = lax.rem(count, config.stages)
        full, along = [barrier.at[slot] for barrier in buffers.full], pl.ds(index * BLOCK, BLOCK)

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.empty.at[slot])

        for part in range(config.parts):
            rows = pl.ds((row * config.parts + part) * ROWS, ROWS)
            half = full[part % config.halves]
            plgpu.copy_gmem_to_smem(a.at[rows, along], buffers.a.at[slot, part], half)
            plgpu.copy_gmem_to_smem(a_scale.at[index, rows], buffers.a_scale.at[slot, part], half)
        columns = pl.ds(column * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(b.at[columns, along], buffers.b.at[slot], full[0])
        if config.columns_scaled:
            plgpu.copy_gmem_to_smem(b_scale.at[index, columns], buffers.b_scale.at[slot], full[0])

    lax.fori_loop(0, steps, step, None)


def _compute(config: Config, b_scale: Any, out: Any, buffers: _Buffers, number: Any, row: Any, column: Any) -> None:
    """This warpgroup's parts of one tile."""
    steps, warpgroup = config.width // BLOCK, lax.axis_index("warpgroup")

    def shared_scale(index: jax.Array) -> jax.Array:
        return jnp.float32(1) if config.columns_scaled else b_scale[jnp.minimum(index, steps - 1), column]

    def step(index: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        totals, factor = state
        # Read a step ahead: it comes from global memory.
        following = shared_scale(index + 1)
        slot = lax.rem(number * steps + index, config.stages)
        added = []
        for half, total in enumerate(totals):
            # Waited for one after the other also keeps the additions before the next half's product, as the compiler
            # moves nothing past the loop of a wait: both halves' sums have no room.
            plgpu.barrier_wait(buffers.full[half].at[slot])
            part = warpgroup * config.halves + half
            scale = plgpu.load(buffers.a_scale.at[slot, part], layout=plgpu.Layout.WGMMA.reduce(1)) * factor

            def issue(accumulator: Any, part: Any = part) -> None:
                plgpu.wgmma(accumulator, buffers.a.at[slot, part], buffers.b.at[slot].transpose((1, 0)))

            partial = pieces.multiply((ROWS, BLOCK), issue)
            if config.columns_scaled:
                columns = plgpu.load(buffers.b_scale.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
                partial = partial * pieces.along_columns(columns, partial)
            added.append(lax.optimization_barrier(total + partial * pieces.along_rows(scale, partial)))
        _release(config, buffers.empty.at[slot])
        return tuple(added), following

    zeros = tuple(pieces.zeros(ROWS, BLOCK) for _ in range(config.halves))
    totals, _ = lax.fori_loop(0, steps, step, (zeros, shared_scale(jnp.int32(0))))
    # Rounded together, they leave room for what the stores need.
    rounded = lax.optimization_barrier(tuple(total.astype(out.dtype) for total in totals))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for half, part in enumerate(rounded):
        first = ((row * WARPGROUPS + warpgroup) * config.halves + half) * ROWS
        _store(out, buffers.out.at[warpgroup, half], part, first, column)


def _release(config: Config, barrier: Any) -> None:
    """Tells the loading warpgroup that this one has read a buffer."""
    if config.interpret:
        plgpu.commit_smem()  # which interpret mode asks for before a buffer is written again
    plgpu.barrier_arrive(barrier)


def _store(out: Any, buffer: Any, part: jax.Array, first: Any, column: Any) -> None:
    """64 rows of the result, by way of shared memory, some columns at a time."""
    for index in range(BLOCK // _STORE_COLUMNS):
        start = index * _STORE_COLUMNS
        buffer[index] = part[:, start : start + _STORE_COLUMNS]
        plgpu.commit_smem()
        columns = pl.ds(column * BLOCK + start, _STORE_COLUMNS)
        plgpu.copy_smem_to_gmem(buffer.at[index], out.at[pl.ds(first, ROWS), columns])
