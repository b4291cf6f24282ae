"""A matmul with integers of 4 or 8 bits on Hopper, which become numbers of 16 bits on their way to the tensor cores.

The kernel computes the transposed product: 64 outputs of the weight for each of two computing warpgroups, and up to 256
rows of x. Of the two operands of a tensor-core product only the left one may be in registers, and the weight has to be
there to be converted. While one warpgroup converts its next 64 x 64 weights, the product of the other one keeps the
tensor cores busy. The weight is read as it is stored, and never written.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import pipeline, scheduler, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.scheduler import Tile, TileOrder
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

CONSUMERS = 2
TILE_OUTPUTS = CONSUMERS * ROWS
"""Outputs of a tile of the result."""
DEPTH = 64
"""Inputs of a step: those that numbers of 16 bits in one swizzle of 128 bytes have."""
_STAGES = {64: 8, 128: 6, 192: 5, 256: 4}
"""Steps whose operands are in flight, by the rows of x in a tile."""
_TILES_TOGETHER = 8


@dataclass(frozen=True)
class IntegerProduct:
    """Compile-time constants of a product x [rows, inputs] @ q [outputs, inputs].T of numbers and integers.

    Attributes:
        rows: rows of x, a multiple of `tile_rows`.
        outputs: a multiple of `TILE_OUTPUTS`.
        inputs: a multiple of `DEPTH`.
        bits: bits of a stored integer, 4 or 8.
        groups: scales of each output; with more than one, each is of a multiple of `DEPTH` inputs, and multiplies the
            integers before the product, in the dtype of x.
        tile_rows: rows of x in a tile of the result, a key of `_STAGES`.
        programs: programs that run at a time.
        interpret: True to interpret the kernel on a CPU.
    """

    rows: int
    outputs: int
    inputs: int
    bits: int
    groups: int
    tile_rows: int
    programs: int
    interpret: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of a tile's loop over the inputs."""
        return self.inputs // DEPTH

    @property
    def ring(self) -> Ring:
        """Ring of shared-memory buffers for the operands."""
        return Ring(_STAGES[self.tile_rows], self.interpret)

    @property
    def order(self) -> TileOrder:
        """Order in which programs compute the tiles of the transposed result."""
        rows = self.outputs // TILE_OUTPUTS
        columns = self.rows // self.tile_rows
        return TileOrder(rows, columns, _TILES_TOGETHER, min(self.programs, rows * columns))


class _Buffers(NamedTuple):
    """Shared memory for operands and for the result of each warpgroup, and the barriers that guard the operands."""

    x: Ref
    q: Ref
    out: Ref
    full: Ref
    empty: Ref


def product(
    spec: IntegerProduct,
    x: Float[Array, "rows in"],
    q: Int[Array, "out in"],
    scales: Float[Array, "out groups"],
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "rows out"]:
    """Multiply x with the transposed matrix of integers times their scales, summed in float32."""
    stages = spec.ring.stages
    kernel = pipeline.launch(
        "integer_product",
        functools.partial(_body, spec),
        consumers=CONSUMERS,
        programs=spec.order.programs,
        interpret=spec.interpret,
        out_type=jax.ShapeDtypeStruct((spec.rows, spec.outputs), out_dtype),
        scratch_types=_Buffers(
            x=wgmma.tiled_smem((stages, spec.tile_rows, DEPTH), x.dtype),
            q=_stored_smem((stages, TILE_OUTPUTS, DEPTH), q.dtype, spec.bits),
            out=wgmma.tiled_smem((CONSUMERS, spec.tile_rows, ROWS), out_dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=pipeline.empty_barriers(CONSUMERS, stages, 1),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(x, q, scales)


def _stored_smem(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, bits: int) -> Any:
    """Return the type of a buffer of integers whose rows are one swizzle: 32 bytes of 4 bits, or 64 bytes of 8."""
    swizzle = DEPTH * bits // 8
    transforms = (plgpu.TilingTransform((wgmma.TILE_ROWS, DEPTH)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _body(spec: IntegerProduct, x: Ref, q: Ref, scales: Ref, out: Ref, *scratch: Any) -> None:
    buffers = _Buffers(*scratch)

    def consume() -> None:
        compute = functools.partial(_compute, spec, scales, out, buffers)
        scheduler.follow_tiles(spec.order, None, lambda number, tile, _: compute(number, tile))
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        # One warp is enough, and need not wait for three others at each copy.
        @plgpu.warp_map
        def _(warp: Index) -> None:
            @pl.when(warp == 0)
            def _():
                load = functools.partial(_load, spec, x, q, buffers)
                tiles = scheduler.claim_tiles(spec.order, None, None, load)
                spec.ring.drain(tiles * spec.steps, buffers.empty)

    pipeline.specialize(lax.axis_index("warpgroup"), CONSUMERS, consume, produce)


def _load(spec: IntegerProduct, x: Ref, q: Ref, buffers: _Buffers, number: Index, tile: Tile) -> None:
    """Load the operands of a tile, step by step, into the ring of shared-memory buffers."""

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        full = buffers.full.at[slot]
        along = pl.ds(index * DEPTH, DEPTH)
        outputs = pl.ds(tile.row * TILE_OUTPUTS, TILE_OUTPUTS)
        rows = pl.ds(tile.column * spec.tile_rows, spec.tile_rows)
        plgpu.copy_gmem_to_smem(q.at[outputs, along], buffers.q.at[slot], full)
        plgpu.copy_gmem_to_smem(x.at[rows, along], buffers.x.at[slot], full)

    spec.ring.produce(number * spec.steps, spec.steps, load)


def _compute(spec: IntegerProduct, scales: Ref, out: Ref, buffers: _Buffers, number: Index, tile: Tile) -> None:
    """Compute this warpgroup's outputs of one tile of the result, and store them to global memory."""
    warpgroup = lax.axis_index("warpgroup")
    own = pl.ds(warpgroup * ROWS, ROWS)
    first = tile.row * TILE_OUTPUTS + warpgroup * ROWS
    dtype = buffers.x.dtype

    def scale(step: Index) -> jax.Array:
        """Read the scales of the outputs for the inputs of a step."""
        group = lax.div(jnp.minimum(step, spec.steps - 1) * spec.groups, spec.steps)
        return wgmma.load_rows(scales.at[pl.ds(first, ROWS), group], optimized=False)

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, factor = state
        # Read a step ahead: it comes from global memory.
        following = scale(index + 1) if spec.groups > 1 else factor
        slot = spec.ring.slot(number * spec.steps + index)
        plgpu.barrier_wait(buffers.full.at[slot])

        def weights() -> jax.Array:
            values = _load_integers(buffers.q.at[slot, own], spec.bits).astype(dtype)
            if spec.groups > 1:  # rounded once: integers are exact in the dtype of x
                wide = jnp.promote_types(dtype, factor.dtype)
                product = values.astype(wide) * wgmma.broadcast_row_values(factor.astype(wide), values)
                values = product.astype(dtype)
            return values

        rows = buffers.x.at[slot].transpose((1, 0))
        (total,) = wgmma.add_products((total,), (weights, rows), interpret=spec.interpret)
        spec.ring.release(slot, buffers.empty)
        return total, following

    total, factor = lax.fori_loop(0, spec.steps, step, (wgmma.zeros(ROWS, spec.tile_rows), scale(jnp.int32(0))))
    if spec.groups == 1:
        total = total * wgmma.broadcast_row_values(factor.astype(jnp.float32), total)
    buffer = buffers.out.at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer.transpose((1, 0))[...] = plgpu.layout_cast(total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    rows = pl.ds(tile.column * spec.tile_rows, spec.tile_rows)
    plgpu.copy_smem_to_gmem(buffer, out.at[rows, pl.ds(first, ROWS)])


def _load_integers(stored: Ref, bits: int) -> jax.Array:
    """Load integers [64, 64] from shared memory 32 bits at a time, and bring them where products take them from."""
    layout = {4: plgpu.Layout.WGMMA_UPCAST_4X, 8: plgpu.Layout.WGMMA_UPCAST_2X}[bits]
    return plgpu.layout_cast(plgpu.load(stored, layout=layout), plgpu.Layout.WGMMA)
