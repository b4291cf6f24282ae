"""A kernel for Hopper that copies an array: TMA into shared memory and out again, without registers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_api import pl, plgpu

COLUMNS = 256
"""32-bit elements in a row of a tile; TMA takes no more in a dim."""


@dataclasses.dataclass(frozen=True)
class CopyTiles:
    """Division of the copy into tiles and programs.

    Each program has up to `2 * ahead` tiles of `rows` KiB in shared memory.
    """

    rows: int = 32
    """Rows of a tile, of 1 KiB each and contiguous in memory."""
    ahead: int = 3
    """Tiles that are read at a time; as many are written meanwhile."""
    per_program: int | None = None
    """Neighbouring tiles that a program copies. The hardware starts a program wherever one has ended, which keeps all
    multiprocessors busy although some reach the memory more slowly. None: `programs` programs share all tiles."""
    programs: int = 132
    """Number of programs if `per_program` is None; 132 is one for each multiprocessor of an H100 or H200."""


def copy(x: jax.Array, *, tiles: CopyTiles | None = None, interpret: bool = False) -> jax.Array:
    """Return a copy of x, made by a kernel whose programs each keep several reads and as many writes under way.

    Args:
        x: float32 [n], n a multiple of the elements of a tile.
        tiles: How the work is divided; default: `CopyTiles()`.
        interpret: True to interpret the kernel on a CPU, with detection of races.

    Raises:
        ValueError: x has another dtype, rank or size.
    """
    cut = tiles or CopyTiles()
    tile = cut.rows * COLUMNS
    if x.ndim != 1 or x.size % tile or x.dtype != jnp.float32:
        raise ValueError(f"the copy takes float32 [n] with n a multiple of {tile}; got {x.dtype} {list(x.shape)}.")
    count = x.size // tile
    slots = min(2 * cut.ahead, cut.per_program or count)
    programs = min(cut.programs, count) if cut.per_program is None else pl.cdiv(count, cut.per_program)

    def body(source: Any, target: Any, slot_tiles: Any, arrived: Any) -> None:
        program = lax.axis_index("program")
        if cut.per_program is None:
            first, stride, mine = program, programs, (count - program + programs - 1) // programs
        else:
            first, stride, mine = (
                program * cut.per_program,
                1,
                jnp.minimum(cut.per_program, count - program * cut.per_program),
            )

        def rows(step: Any) -> Any:
            return pl.ds((first + step * stride) * cut.rows, cut.rows)

        def fetch(step: Any) -> None:
            slot = lax.rem(step, slots)
            plgpu.copy_gmem_to_smem(source.at[rows(step)], slot_tiles.at[slot], arrived.at[slot])

        for step in range(cut.ahead):
            pl.when(step < mine)(lambda step=step: fetch(jnp.int32(step)))

        def move(step: Any, _: None) -> None:
            slot = lax.rem(step, slots)
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.copy_smem_to_gmem(slot_tiles.at[slot], target.at[rows(step)])
            # The slot of the next tile to read is that of the tile written `ahead` steps ago.
            plgpu.wait_smem_to_gmem(cut.ahead, wait_read_only=True)
            pl.when(step + cut.ahead < mine)(lambda: fetch(step + cut.ahead))

        lax.fori_loop(0, mine, move, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the end of the kernel waits for what is being written

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count * cut.rows, COLUMNS), x.dtype),
        scratch_types=[
            plgpu.SMEM((slots, cut.rows, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(programs,),
        grid_names=("program",),
        kernel_name="copy",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return kernel(x.reshape(-1, COLUMNS)).reshape(x.shape)
