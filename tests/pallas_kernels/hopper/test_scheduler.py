"""Every tile is computed once, in an order in which nothing waits for what comes later."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper import scheduler
from pallas_kernels.hopper.scheduler import TileOrder, item_count


@pytest.mark.parametrize(("rows", "columns", "group"), [(4, 3, 2), (5, 2, 2), (3, 4, 8), (1, 1, 4)])
def test_every_tile_of_every_chunk_comes_once_and_chunks_in_turn(rows, columns, group):
    chunks = 3
    order = TileOrder(rows, columns, group, programs=1, chunks=chunks)
    seen = [tuple(map(int, order.tile(i))) for i in range(order.total)]
    assert len(set(seen)) == len(seen)
    assert set(seen) == {(s, r, c) for s in range(chunks) for r in range(rows) for c in range(columns)}
    assert [chunk for chunk, _, _ in seen] == sorted(chunk for chunk, _, _ in seen)


def test_a_group_of_rows_is_finished_before_the_next_begins():
    order = TileOrder(6, 3, 2, programs=1)
    rows = [int(order.tile(i).row) for i in range(18)]
    assert [row // 2 for row in rows] == sorted(row // 2 for row in rows)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_cluster_computes_neighbouring_tiles_and_all_clusters_every_tile(side_by_side):
    order = TileOrder(6, 4, 4, programs=1, chunks=2, cluster=2, side_by_side=side_by_side)
    members = jax.vmap(lambda _: jax.vmap(order.tile)(jnp.arange(order.total)), axis_name="cluster")(jnp.arange(2))
    first, second = (zip(*(array[i].tolist() for array in members), strict=True) for i in range(2))
    first = list(first)
    second = list(second)
    step = (0, 0, 1) if side_by_side else (0, 1, 0)
    assert second == [tuple(a + b for a, b in zip(tile, step, strict=True)) for tile in first]
    assert sorted(first + second) == [(s, r, c) for s in range(2) for r in range(6) for c in range(4)]


@pytest.mark.parametrize(("programs", "tiles"), [(4, 11), (4, 4), (4, 2), (1, 3)])
def test_the_programs_share_all_tiles(programs, tiles):
    counts = [item_count(program, programs, tiles) for program in range(programs)]
    assert counts == [len(range(program, tiles, programs)) for program in range(programs)]


@pytest.mark.parametrize(("total", "alternate"), [(11, False), (11, True), (3, True)])
def test_every_item_is_dealt_once(total, alternate):
    """In alternating order the program that comes first in one round comes last in the next."""
    programs = 4

    def visit(number, index, seen):
        return seen.at[index].set(number + 1)

    def share(_):
        return scheduler.deal(total, programs, visit, jnp.zeros(total, jnp.int32), alternate)

    counts, rounds = jax.vmap(share, axis_name="program")(jnp.arange(programs))
    assert jnp.array_equal(counts, (rounds > 0).sum(axis=1))
    assert rounds.sum(axis=0).tolist() == [index // programs + 1 for index in range(total)]
    if total > 7:
        second = rounds[:, programs : 2 * programs].argmax(axis=0).tolist()
        assert second == ([3, 2, 1, 0] if alternate else [0, 1, 2, 3])
