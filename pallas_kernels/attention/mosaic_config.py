"""Compile-time configuration of the Hopper attention kernels, and their loop over score tiles not fully masked."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.attention.request import Options
from pallas_kernels.attention.visible_tiles import Blocks, Runs, visit_bounds
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.mosaic_api import Index, Ref, ScratchType, plgpu

State = TypeVar("State")


class Tail(NamedTuple):
    """Division of the last key blocks of the fused backward, in the last batch entry, among several programs.

    Attributes:
        blocks: Number of key blocks of each key head that are divided.
        parts: Number of programs that share the visits of each block, two or more.
    """

    blocks: int
    parts: int


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time configuration of one Hopper attention kernel: mask, lengths, block sizes and warpgroups.

    Attributes:
        options: Mask, scale and soft cap.
        length: T before padding.
        key_length: S before padding.
        query_block: Queries of a tile.
        key_block: Keys of a tile.
        stages: Tiles in flight from global memory.
        warpgroups: Consumer warpgroups; one more loads.
        programs: Programs that run at a time, one on each multiprocessor.
        interpret: True to interpret the kernel on a CPU.
        head_parts: Programs among which the fused backward divides the query heads of a key head.
        alternates: True if every second round of the forward's query blocks goes to the programs in reverse order.
        tail: Division of the last key blocks of the fused backward among several programs; None for no division.
    """

    options: Options
    length: int
    key_length: int
    query_block: int
    key_block: int
    stages: int = 2
    warpgroups: int = 2
    programs: int = 132
    interpret: bool = False
    head_parts: int = 1
    alternates: bool = False
    tail: Tail | None = None

    @property
    def blocks(self) -> Blocks:
        """Sequence lengths and block sizes, which determine the tiles that the kernel visits."""
        return Blocks(self.length, self.key_length, self.query_block, self.key_block)

    @property
    def ring(self) -> Ring:
        """Circular shared-memory buffer through which the loading warpgroup passes tiles to the computing ones."""
        return Ring(self.stages, self.interpret)

    def kernel(
        self, name: str, body: Callable[..., None], synchronises: bool = False, **parameters: Any
    ) -> Callable[..., Any]:
        """Build a launchable kernel from its body, with the compiler options that all Hopper attention kernels share.

        Args:
            name: Name of the kernel, which a profile shows.
            body: Kernel body.
            synchronises: True if the threads of a warpgroup never read what they write to shared memory, other than by
                TMA or wgmma after `commit_smem`, so that stores need no barriers around them.
            parameters: Further arguments of `pipeline.launch`.
        """
        return pipeline.launch(
            name,
            body,
            consumers=self.warpgroups,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=synchronises,
                reduction_scratch_bytes=0,  # No reduction of these kernels leaves a warp.
            ),
            **parameters,
        )

    def tiled_smem(self, shape: tuple[int, ...], dtype: DTypeLike, slice_columns: int = 0) -> ScratchType:
        """Return the type of a shared-memory buffer [..., rows, columns] in the layout that wgmma and TMA expect.

        Args:
            shape: Shape of the buffer.
            dtype: Element type.
            slice_columns: Columns that products take at a time (of this operand, or of the other one, whose form must
                be the same); 0 for all of them.
        """
        bits = jnp.dtype(dtype).itemsize * 8
        # A product that sums over the rows of a tile needs at least one swizzle's worth of them.
        rows_bytes = min(self.query_block, self.key_block) * bits // 8
        slice_swizzle = plgpu.find_swizzle((slice_columns or shape[-1]) * bits)
        return wgmma.tiled_smem(shape, dtype, min(slice_swizzle, rows_bytes))


class Visits(NamedTuple):
    """The visible tiles of the score matrix in the row of one query block, or the column of one key block.

    Attributes:
        total: Number of tiles.
        whole: First tile that needs no mask.
        end_whole: End of the tiles that need no mask.
        tile: Returns the number of the block of the other side that a visit is for.
        runs: Runs of tiles that any block has, without the first `start` visits that `fold` leaves out.
    """

    total: Index
    whole: Index
    end_whole: Index
    tile: Callable[[Index], Index]
    runs: Runs

    def part(self, number: Index, parts: Index) -> "Visits":
        """Return share `number` (from 0) of the visits, divided into `parts` shares of about the same size."""
        start = lax.div(self.total * number, parts)
        end = lax.div(self.total * (number + 1), parts)
        whole, end_whole = (jnp.clip(edge, start, end) - start for edge in (self.whole, self.end_whole))
        return Visits(end - start, whole, end_whole, lambda count: self.tile(count + start), self.runs)

    def repeat(self, times: int) -> "Visits":
        """Return visits in which each tile is visited `times` times in a row."""

        def tile(count):
            return self.tile(lax.div(count, jnp.int32(times)))

        return Visits(self.total * times, self.whole * times, self.end_whole * times, tile, self.runs)

    def fold_in_one_loop(self, step: Callable[[bool | jax.Array, Index, State], State], state: State) -> State:
        """Do the same as `fold` in one loop: half the code and half its compilation time, but a branch in each tile.

        `needs_mask` is a boolean scalar array if there are both whole and cut tiles.
        """
        cut = self.runs.before or self.runs.after

        def visit(index: jax.Array, state: State) -> State:
            masked = (index < self.whole) | (index >= self.end_whole) if cut and self.runs.whole else cut
            return step(masked, index, state)

        return lax.fori_loop(0, self.total, visit, state)

    def fold(self, step: Callable[[bool, Index, State], State], state: State, start: Index = 0) -> State:
        """Loop over the tiles from `start` on with state = step(needs_mask, index, state); return the last state.

        Each run has its own loop, so that `needs_mask` is known while tracing.
        """
        edges = start, jnp.maximum(self.whole, start), jnp.maximum(self.end_whole, start), self.total
        for masked, exists, (first, end) in zip((True, False, True), self.runs, itertools.pairwise(edges), strict=True):
            if exists:
                state = lax.fori_loop(first, end, functools.partial(step, masked), state)
        return state


def read_visits(schedule: tuple[Ref, ...], batch: Index, block: Index, runs: Runs, descending: bool = False) -> Visits:
    """Return the tiles that a block of queries or keys visits, read from precomputed lists in global memory.

    Args:
        schedule: `tiles.key_schedule` or `tiles.query_schedule`, in global memory.
        batch: Index of the sequence.
        block: Index of the block.
        runs: `tiles.key_runs` or `tiles.query_runs`.
        descending: True to visit a run of tiles from its last to its first.
    """
    table = schedule[0]
    row = batch if table.shape[0] > 1 else 0
    if len(schedule) == 2:
        counts = schedule[1]
        return Visits(counts[row, block, 1], 0, counts[row, block, 0], lambda count: table[row, block, count], runs)
    first, first_whole, end_whole, end = (table[row, block, index] for index in range(4))
    total, whole, end_whole = visit_bounds(first, first_whole, end_whole, end, descending)
    return Visits(total, whole, end_whole, lambda count: end - 1 - count if descending else first + count, runs)
