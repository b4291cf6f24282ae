"""Which tiles a mask leaves: exact for every mask, safe with segments, listed for kernels."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.masks import Layout, Mask
from pallas_kernels.attention.request import Segments
from pallas_kernels.attention.visible_tiles import (
    Blocks,
    key_lists,
    key_runs,
    key_schedule,
    possible_tiles,
    query_lists,
    query_runs,
    query_schedule,
    visible_block_pairs,
    visible_tiles,
    visit_bounds,
)

PATTERN = np.random.default_rng(0).random((4, 4)) < 0.4
LAYOUT = Layout.from_pattern(PATTERN, 5)
MASKS = (
    Mask(),
    Mask(causal=False),
    Mask(window=5),
    Mask(causal=False, window=3),
    Mask(causal=False, window=4, window_after=2),
    Mask(window=2, global_tokens=3),
    Mask(window=4, global_tokens=9),
    Mask(causal=False, window=2, window_after=2, global_tokens=5),
    Mask(layout=LAYOUT),
    Mask(causal=False, layout=LAYOUT),
    Mask(window=3, layout=LAYOUT),
)
LENGTHS = ((20, 20), (17, 17), (7, 19), (19, 7))


def visible_pairs_of(mask, length, key_length):
    positions = jnp.arange(length) + key_length - length
    visible = mask.visible(positions, jnp.arange(key_length))
    return np.ones((length, key_length), bool) if visible is None else np.asarray(visible)


def tiles_of(visible, query_block, key_block):
    """(row, column) -> the part of [T, S] in that tile."""
    for i, j in itertools.product(range(-(-visible.shape[0] // query_block)), range(-(-visible.shape[1] // key_block))):
        yield (i, j), visible[i * query_block : (i + 1) * query_block, j * key_block : (j + 1) * key_block]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_are_exactly_those_with_a_visible_pair(mask):
    for length, key_length in LENGTHS:
        if mask.layout is not None and length > key_length:
            continue
        for query_block, key_block in ((4, 3), (8, 5), (16, 16)):
            whole, cut = visible_block_pairs(mask, length, key_length, query_block, key_block)
            tiles = dict(tiles_of(visible_pairs_of(mask, length, key_length), query_block, key_block))
            full = {at for at, tile in tiles.items() if tile.all() and (at[1] + 1) * key_block <= key_length}
            assert {tuple(pair) for pair in whole.tolist()} == full
            assert {tuple(pair) for pair in cut.tolist()} == {at for at, tile in tiles.items() if tile.any()} - full


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_with_segments_no_visible_pair_is_skipped_and_no_hidden_one_is_whole(mask):
    ids = jnp.asarray([[1] * 6 + [2] * 9 + [3] * 5, [1] * 20])
    segments = Segments(ids, ids)
    blocks = Blocks(20, 20, 4, 4)
    some, every = (np.asarray(x) for x in visible_tiles(mask, blocks, segments))
    positions = jnp.arange(20)
    visible = mask.visible(positions, positions, segments.global_tokens(mask))
    visible = np.asarray(jnp.broadcast_to(True if visible is None else visible, (2, 20, 20)))
    visible = visible & np.asarray(ids[:, :, None] == ids[:, None, :])
    possible = possible_tiles(mask, blocks, True)
    for row in range(2):
        for at, tile in tiles_of(visible[row], 4, 4):
            assert some[row][at] or not tile.any()
            assert tile.all() or not every[row][at]
            assert possible[at] or not some[row][at]
    if mask == Mask():
        assert some[0].sum() < some[1].sum() == 15


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lists_name_the_whole_tiles_first_and_then_the_cut_ones(mask, segmented):
    ids = jnp.asarray([[1] * 7 + [2] * 13])
    segments = Segments(ids, ids) if segmented else None
    blocks = Blocks(20, 20, 4, 5)
    some, every = (np.asarray(x)[0] for x in visible_tiles(mask, blocks, segments))
    for lists, turned in ((key_lists, False), (query_lists, True)):
        tiles, counts = lists(mask, blocks, segments)
        assert tiles.dtype == counts.dtype == jnp.int32 and tiles.shape[:2] == counts.shape[:2]
        for row in range(tiles.shape[1]):
            seen, full = (x[:, row] if turned else x[row] for x in (some, every))
            whole, count = counts[0, row].tolist()
            assert tiles[0, row, :whole].tolist() == np.flatnonzero(full).tolist()
            assert tiles[0, row, whole:count].tolist() == np.flatnonzero(seen & ~full).tolist()
            assert (tiles[0, row, count:] == 0).all()


def test_a_layout_is_a_hashable_pattern():
    again = Layout.from_pattern(PATTERN, 5)
    assert again == LAYOUT and hash(again) == hash(LAYOUT)
    np.testing.assert_array_equal(again.pattern, PATTERN)
    assert Layout.from_pattern(~PATTERN, 5) != LAYOUT


def runs_of(schedule, start, descending):
    """Which runs any row of a schedule has, one row after the other."""
    found = np.zeros(3, bool)
    for row in np.asarray(schedule[-1])[0]:
        bounds = visit_bounds(*row, descending=descending) if len(schedule) == 1 else (row[1], 0, row[0])
        total, whole, end_whole = bounds
        found |= np.diff(np.maximum([0, whole, end_whole, total], min(start, total))) > 0
    return tuple(found)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("start", "descending"), [(0, False), (1, True)])
def test_runs_are_those_of_some_block(mask, start, descending):
    for length, key_length in LENGTHS:
        if mask.layout is not None and length > key_length:
            continue
        for sizes in ((4, 3), (8, 5), (16, 16)):
            blocks = Blocks(length, key_length, *sizes)
            keys = key_schedule(mask, blocks, None, descending)
            assert key_runs(mask, blocks, False, start, descending) == runs_of(keys, start, descending)
            queries = query_schedule(mask, blocks, None, descending)
            assert query_runs(mask, blocks, False, descending) == runs_of(queries, 0, descending)


def test_common_masks_leave_few_runs():
    blocks = Blocks(1000, 1000, 128, 128)
    assert key_runs(Mask(), blocks, False, start=1, descending=True) == (False, True, False)
    assert key_runs(Mask(causal=False), blocks, False, start=1, descending=True) == (False, True, False)
    assert query_runs(Mask(), blocks, False) == (True, True, False)
    assert key_runs(Mask(), blocks, True) == (True, True, True)
    assert key_runs(Mask(global_tokens=3, window=9), blocks, True) == (False, True, True)
