"""Assignment of tiles to the programs of a persistent kernel: fixed beforehand, or claimed at run time.

A persistent kernel starts one program on each multiprocessor, which computes one item (a tile of the result, a block of
queries) after the other. Items are either dealt out beforehand (`deal`), or claimed from a counter while the kernel
runs (`claim_tiles`, `claim`): kernels that wait for other devices must claim them.

Why these must claim. A kernel that fills a GPU and waits for its peers must not depend on being alone there. Collective
operations that run at the same time, of the same or of another axis of the mesh, occupy multiprocessors too, and wait
for each other: device 0 may be full of our programs, so that its part of an all-gather cannot start, while on device 1
that all-gather keeps some of our programs from starting. Were tiles dealt out beforehand, device 0 would wait for tiles
of programs that never start, and neither kernel would end. Instead a program takes the next tile, and the next rows to
send, from a counter of its device when it is ready for them, so that the programs that do run do all the work. Waiting
then never forms a cycle:

- Sending never waits for other devices: in the all-gather kernel a dedicated warp sends, and in the reduce-scatter
  kernel the tiles for other devices come first in the order, and each is announced before its program waits.
- So every device with one running program sends everything. Then everything that any program waits for has arrived, and
  every kernel ends, whatever the collective operations do; they in turn end when the kernel has left the GPU.
- At least one program runs on every device: the collective operations of NCCL and XLA take a few dozen multiprocessors
  of the 132. All devices of the mesh start the kernel together (XLA puts a barrier before it), after the same work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_api import Index, Ref, fetch_and_increment, plgpu

State = TypeVar("State")


# --- order of the tiles ------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Coordinates of a tile of a matmul's result: its chunk of rows, and its row and column within the chunk."""

    chunk: Index
    row: Index
    column: Index


@dataclass(frozen=True)
class TileOrder:
    """Order in which the tiles of a matmul's result are computed, one chunk of rows after the other.

    Within a chunk, bands of `group` rows of tiles are walked column by column: tiles that are computed at the same time
    then share their operands in the L2 cache.

    Attributes:
        rows: Rows of tiles of one chunk.
        columns: Columns of tiles.
        group: Rows of tiles of one band.
        programs: Programs, or clusters of programs, that share the tiles.
        chunks: Chunks of the result, one above the other.
        cluster: Number of programs of a cluster, which compute neighbouring tiles at the same time. It must divide
            `rows` and `group`, or `columns` if `side_by_side`.
        side_by_side: True if the tiles of a cluster are side by side, False if they are one above the other.
    """

    rows: int
    columns: int
    group: int
    programs: int = 1
    chunks: int = 1
    cluster: int = 1
    side_by_side: bool = False

    @property
    def total(self) -> int:
        """Number of tiles of the result over all chunks, or, with clusters, of groups of tiles."""
        return self.chunks * self.rows * self.columns // self.cluster

    def tile(self, index: Index) -> Tile:
        """Return the coordinates of the `index`-th tile, or of this program's tile in a cluster's `index`-th group."""
        high, wide = (1, self.cluster) if self.side_by_side else (self.cluster, 1)
        rows = self.rows // high
        columns = self.columns // wide
        group = self.group // high
        chunk_tiles = rows * columns
        band_tiles = group * columns
        chunk = lax.div(index, chunk_tiles)
        within = lax.rem(index, chunk_tiles)
        band = lax.div(within, band_tiles)
        in_band = lax.rem(within, band_tiles)
        height = jnp.minimum(group, rows - band * group)
        row = band * group + lax.rem(in_band, height)
        column = lax.div(in_band, height)
        if self.cluster == 1:
            return Tile(chunk, row, column)
        member = lax.axis_index("cluster")
        if self.side_by_side:
            return Tile(chunk, row, column * self.cluster + member)
        return Tile(chunk, row * self.cluster + member, column)


# --- items dealt out beforehand ----------------------------------------------------------------------------------


def deal(
    total: int,
    programs: int,
    visit: Callable[[Index, Index, State], State],
    state: State,
    alternate: bool = False,
) -> tuple[Index, State]:
    """Run state = visit(number, index, state) over this program's round-robin share of items; return (count, state).

    Args:
        total: Number of items of all programs.
        programs: Number of programs of the kernel's `program` axis.
        visit: Called with the item's number within this program, its index, and the state.
        state: State before the first item.
        alternate: True to deal every second round in the reverse order of programs. If items are sorted by decreasing
            work, each program then gets about the same work, whereas in the same order the first one would get the
            most in every round.

    Returns:
        How many items this program has, and the state after the last.
    """
    program = lax.axis_index("program")
    rounds = -(-total // programs)

    def place(number: Index) -> Index:
        if not alternate:
            return program
        return jnp.where(lax.rem(number, 2) == 0, program, programs - 1 - program)

    count = item_count(place(jnp.int32(rounds - 1)), programs, total)

    def step(number: jax.Array, state: State) -> State:
        return visit(number, number * programs + place(number), state)

    return count, lax.fori_loop(0, count, step, state)


def item_count(program: Index, programs: int, total: int) -> Index:
    """Return how many items a program gets when `total` items are dealt out round-robin."""
    return lax.div(total - 1 + programs - program, programs)


# --- tiles claimed while the kernel runs -------------------------------------------------------------------------


class ClaimedTiles(NamedTuple):
    """Shared memory in which the loading warpgroup tells the computing ones which tiles their program has claimed."""

    indices: Ref
    written: Ref


def claim_scratch(stages: int) -> ClaimedTiles:
    """Return the shared-memory allocations with which a kernel of `stages` operand buffers claims tiles one by one.

    The producer is at most `stages` steps, and so as many tiles, ahead of the consumers: with one slot more, none is
    overwritten before it is read.
    """
    slots = stages + 1
    return ClaimedTiles(plgpu.SMEM((slots,), jnp.int32), plgpu.Barrier(num_barriers=slots))


def claim_tiles(
    order: TileOrder, claimed: ClaimedTiles | None, counter: Ref | None, visit: Callable[[Index, Tile], None]
) -> Index:
    """Call visit(number, tile) to load each of this program's tiles, claimed or dealt out; return how many there were.

    Args:
        order: Order of the tiles.
        claimed: Ring that tells the consumers; None if tiles are dealt out beforehand.
        counter: Semaphore of this device, 0 at the start of the kernel, that counts claimed tiles; None without a ring.
        visit: Loads the operands of a tile.
    """
    if claimed is None or counter is None:
        return deal(order.total, order.programs, lambda number, index, _: visit(number, order.tile(index)), None)[0]
    slots = claimed.indices.shape[0]

    def publish(number: Index, index: Index) -> None:
        slot = lax.rem(number, slots)
        claimed.indices[slot] = index
        plgpu.barrier_arrive(claimed.written.at[slot])

    def load(number: Index, index: Index) -> Index:
        publish(number, index)
        following = fetch_and_increment(counter)
        visit(number, order.tile(index))
        return following

    count = _while_below(order.total, fetch_and_increment(counter), load)
    publish(count, jnp.int32(order.total))
    return count


def follow_tiles(order: TileOrder, claimed: ClaimedTiles | None, visit: Callable[[Index, Tile, Tile], None]) -> Tile:
    """Call visit(number, tile, previous) to compute each tile that the loading warpgroup loads; return the last tile.

    The tile before the first one, and the last tile of a program without tiles, is the very last tile of the order.
    """
    last = jnp.int32(order.total - 1)
    if claimed is None:
        deal(
            order.total,
            order.programs,
            lambda number, index, _: visit(number, order.tile(index), order.tile(last)),
            None,
        )
        return order.tile(last)
    slots = claimed.indices.shape[0]

    def read(number: Index) -> jax.Array:
        slot = lax.rem(number, slots)
        plgpu.barrier_wait(claimed.written.at[slot])
        return claimed.indices[slot]

    def step(carry: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        number, index, previous = carry
        visit(number, order.tile(index), order.tile(previous))
        return number + 1, read(number + 1), index

    start = jnp.int32(0), read(jnp.int32(0)), last
    return order.tile(lax.while_loop(lambda carry: carry[1] < order.total, step, start)[2])


def claim(total: int, counter: Ref, visit: Callable[[Index, Callable[[], Index]], Index]) -> None:
    """Claim items from a counter that all programs share, and call visit(index, claim_next) for each, in one warp.

    `visit` returns the value of claim_next(), which it calls where the latency of the claim is hidden.
    """

    def claim_next():
        return fetch_and_increment(counter)

    _while_below(total, claim_next(), lambda _, index: visit(index, claim_next))


def _while_below(total: int, index: Index, visit: Callable[[Index, Index], Index]) -> Index:
    """Repeat index = visit(number, index) while index < total, at most `total` times; return the number of calls.

    The code of a single warp may have no loop without a bound. Of two nested bounded loops, the outer one skips what is
    left of it quickly.
    """
    side = math.isqrt(total - 1) + 1

    def turn(_: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
        return lax.cond(carry[1] < total, lambda: (carry[0] + 1, visit(*carry)), lambda: carry)

    def turns(_: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
        return lax.cond(carry[1] < total, lambda: lax.fori_loop(0, side, turn, carry), lambda: carry)

    return lax.fori_loop(0, side, turns, (jnp.int32(0), index))[0]
