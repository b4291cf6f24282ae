"""A kernel for Hopper that copies an array: TMA into shared memory and out again, without registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_api import pl, plgpu

PROGRAMS = 132
"""One for each multiprocessor of an H100 or H200."""
ROWS, COLUMNS = 32, 256
"""Shape of a tile of 32-bit elements, 32 KiB that are contiguous in memory; 256 is the most that TMA takes in a dim."""
AHEAD = 3
"""Tiles that are read at a time; as many are written meanwhile."""


def copy(x: jax.Array, *, programs: int = PROGRAMS, interpret: bool = False) -> jax.Array:
    """Return a copy of x, made by a kernel whose programs each keep `AHEAD` reads and `AHEAD` writes under way.

    Args:
        x: float32 [n], n a multiple of `ROWS` * `COLUMNS`.
        programs: Programs of the kernel.
        interpret: True to interpret the kernel on a CPU, with detection of races.

    Raises:
        ValueError: x has another dtype, rank or size.
    """
    tile = ROWS * COLUMNS
    if x.ndim != 1 or x.size % tile or x.dtype != jnp.float32:
        raise ValueError(f"the copy takes float32 [n] with n a multiple of {tile}; got {x.dtype} {list(x.shape)}.")
    slots = 2 * AHEAD
    count = x.size // tile
    programs = min(programs, count)

    def body(source: Any, target: Any, tiles: Any, arrived: Any) -> None:
        first = lax.axis_index("program")
        mine = (count - first + programs - 1) // programs

        def rows(step: Any) -> Any:
            return pl.ds((first + step * programs) * ROWS, ROWS)

        def fetch(step: Any) -> None:
            slot = lax.rem(step, slots)
            plgpu.copy_gmem_to_smem(source.at[rows(step)], tiles.at[slot], arrived.at[slot])

        for step in range(AHEAD):
            pl.when(step < mine)(lambda step=step: fetch(jnp.int32(step)))

        def move(step: Any, _: None) -> None:
            slot = lax.rem(step, slots)
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.copy_smem_to_gmem(tiles.at[slot], target.at[rows(step)])
            # The slot of the next tile to read is that of the tile written `AHEAD` steps ago.
            plgpu.wait_smem_to_gmem(AHEAD, wait_read_only=True)
            pl.when(step + AHEAD < mine)(lambda: fetch(step + AHEAD))

        lax.fori_loop(0, mine, move, None)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count * ROWS, COLUMNS), x.dtype),
        scratch_types=[
            plgpu.SMEM((slots, ROWS, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(programs,),
        grid_names=("program",),
        kernel_name="copy",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(x.reshape(-1, COLUMNS)).reshape(x.shape)
