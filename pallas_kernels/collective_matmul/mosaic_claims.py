"""Which program computes which tile of a kernel that waits for other devices: it is decided while the kernel runs.

A kernel that fills a GPU and waits for its peers must not depend on being alone there. Collective operations that run
beside it, of the same or of another axis of the mesh, hold multiprocessors too, and wait for each other: device 0 may
be full of our programs, so that its part of an all-gather cannot start, while on device 1 that all-gather keeps some of
our programs from starting. Were tiles dealt out beforehand, device 0 would wait for tiles of programs that never come,
and none would ever end. Here a program takes the next tile, and the next rows to send, from a counter of its device
when it is ready for them, so that the programs that do run do all the work. That makes waiting free of circles:

- Sending never waits for other devices: not in the gathering kernel, where a warp of its own does it, nor in the
  scattering one, where the tiles for others come first in the order, and each is announced before its program waits.
- So every device with one running program sends everything, then everything that any program waits for has arrived,
  and every kernel of ours ends, whatever the collective operations beside it do; they end when it leaves.
- One program does run on every device: the collective operations of NCCL and XLA take a few dozen multiprocessors of
  the 132. All devices of the mesh start the kernel together (XLA puts a barrier before it), after the same work.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.mosaic_product import Product
from pallas_kernels.mosaic_api import fetch_and_increment, pl, plgpu

_TILES, _SENDS = range(2)


class Claimed(NamedTuple):
    """How the loader tells the computing warpgroups which tile comes next: a ring in shared memory."""

    indices: Any
    written: Any


def scratch(product: Product) -> Claimed | None:
    """None on a single device, where nobody waits and tiles are dealt out beforehand.

    The loader is at most `stages` steps, and so as many tiles, ahead of the computing warpgroups: with one slot more
    none is overwritten before it is read.
    """
    if product.devices == 1:
        return None
    slots = product.tiling.stages + 1
    return Claimed(plgpu.SMEM((slots,), jnp.int32), plgpu.Barrier(num_barriers=slots))


def counters(product: Product) -> Any:
    """Of tiles and of blocks to send: this device's, for all programs, 0 at the start of the kernel."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((2,))) if product.devices > 1 else None


def claim_tiles(
    product: Product, claimed: Claimed | None, counters: Any, visit: Callable[[Any, tiles.Tile], None]
) -> Any:
    """For the loader: visit(number, tile) for every tile that this program gets; returns how many these were."""
    if claimed is None:
        return _dealt(product, lambda number, index: visit(number, product.tile(index)))

    def publish(number: Any, index: Any) -> None:
        slot = lax.rem(number, product.tiling.stages + 1)
        claimed.indices[slot] = index
        plgpu.barrier_arrive(claimed.written.at[slot])

    def load(number: Any, index: Any) -> Any:
        publish(number, index)
        following = fetch_and_increment(counters.at[_TILES])
        visit(number, product.tile(index))
        return following

    count = _while_below(product.total_tiles, fetch_and_increment(counters.at[_TILES]), load)
    publish(count, jnp.int32(product.total_tiles))
    return count


def follow_tiles(
    product: Product, claimed: Claimed | None, visit: Callable[[Any, tiles.Tile, tiles.Tile], None]
) -> tiles.Tile:
    """For a computing warpgroup: visit(number, tile, the tile before) for the same tiles; returns the last.

    Before the first, and where there is none, stands the very last tile of all.
    """
    last = jnp.int32(product.total_tiles - 1)
    if claimed is None:
        _dealt(product, lambda number, index: visit(number, product.tile(index), product.tile(last)))
        return product.tile(last)

    def read(number: Any) -> jax.Array:
        slot = lax.rem(number, product.tiling.stages + 1)
        plgpu.barrier_wait(claimed.written.at[slot])
        return claimed.indices[slot]

    def step(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        number, index, before = carry
        visit(number, product.tile(index), product.tile(before))
        return number + 1, read(number + 1), index

    start = jnp.int32(0), read(jnp.int32(0)), last
    return product.tile(lax.while_loop(lambda carry: carry[1] < product.total_tiles, step, start)[2])


def claim_sends(total: int, counters: Any, send: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """For the sender: send(index, claim) for the blocks, of `total`, that this program gets; it returns claim()'s."""
    claim = lambda: fetch_and_increment(counters.at[_SENDS])  # noqa: E731
    _while_below(total, claim(), lambda _, index: send(index, claim))


def _while_below(total: int, index: Any, visit: Callable[[Any, Any], Any]) -> Any:
    """index = visit(number, index) while it is below `total`, at most `total` times; returns how many these were.

    The code of a single warp may have no loop without a bound: one in another passes soon over what is left of it.
    """
    side = math.isqrt(total - 1) + 1

    def turn(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.cond(carry[1] < total, lambda: (carry[0] + 1, visit(*carry)), lambda: carry)

    def turns(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.cond(carry[1] < total, lambda: lax.fori_loop(0, side, turn, carry), lambda: carry)

    return lax.fori_loop(0, side, turns, (jnp.int32(0), index))[0]


def _dealt(product: Product, visit: Callable[[Any, Any], None]) -> Any:
    program = lax.axis_index("program")
    count = tiles.count_for(program, product.programs, product.total_tiles)
    lax.fori_loop(0, count, lambda number, _: visit(number, number * product.programs + program), None)
    return count
