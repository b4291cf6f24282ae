"""Even shares of causal work among programs, and which tiles the forward's warpgroups may pass over."""

import pytest

from pallas_kernels.attention.balance import alternation_helps, choose_head_parts, choose_tail, fewer_warpgroups_help
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic_config import KernelConfig, Tail, Visits
from pallas_kernels.attention.mosaic_forward import _hides_tiles
from pallas_kernels.attention.request import Options
from pallas_kernels.attention.visible_tiles import Runs


def config(length, queries=128, keys=128, causal=True, warpgroups=2, key_length=None):
    options = Options(Mask(causal), 0.1)
    return KernelConfig(options, length, key_length or length, queries, keys, warpgroups=warpgroups)


@pytest.mark.parametrize(
    ("length", "sequences", "causal", "helps"),
    [(4096, 64, True, True), (2048, 128, True, False), (8192, 32, False, False), (128, 4, True, False)],
)
def test_blocks_are_dealt_in_alternating_order_only_where_that_saves_time(length, sequences, causal, helps):
    """2048 tokens of 128 heads end after an almost full round whatever the order."""
    assert alternation_helps(config(length, causal=causal), sequences) is helps


@pytest.mark.parametrize(
    ("shape", "causal", "divided"),
    [
        # 2048 programs: 15 rounds of 132, and 68. More parts would end earlier, but take longer to sum.
        ((1, 16384, 16, 128), False, Tail(5, 3)),
        ((1, 16384, 33, 128), False, None),  # 32 rounds
        ((1, 16384, 16, 128), True, None),
    ],
)
def test_key_blocks_are_divided_where_the_last_round_of_programs_is_small(shape, causal, divided):
    assert choose_tail(config(shape[1], queries=64, causal=causal), shape) == divided


def test_the_tail_shortens_the_last_round():
    """Of 136 programs the last 4 are a round of their own; eight programs for each of their blocks shorten it."""
    assert choose_tail(config(136 * 128, queries=64, causal=False), (1, 136 * 128, 1, 128)) == Tail(4, 8)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "causal", "helps"),
    [
        (8, 2048, 24, True, False),
        (9, 1768, 24, True, True),
        (4, 4096, 16, True, False),
        (4, 4096, 16, False, False),
        (3, 3000, 16, True, False),
        (1, 8192, 16, True, False),
        (16, 1024, 16, True, True),
        (4, 2048, 16, True, True),
        (64, 1024, 12, True, True),
    ],
)
def test_two_warpgroups_compute_the_forward_where_that_was_measured_faster(batch, length, heads, causal, helps):
    """Head dim 64 on an H200."""
    three = config(length, queries=192, causal=causal, warpgroups=3)
    assert fewer_warpgroups_help(three, config(length, causal=causal), batch * heads) is helps


@pytest.mark.parametrize(
    ("length", "batch", "heads", "kv_heads", "parts"),
    [(6144, 2, 24, 4, {2, 3, 6}), (16384, 1, 16, 16, {1}), (4096, 16, 32, 8, {1}), (1000, 2, 4, 4, {1})],
)
def test_query_heads_are_divided_only_where_there_are_few_key_heads(length, batch, heads, kv_heads, parts):
    assert choose_head_parts(config(length, queries=64), heads, (batch, length, kv_heads, 128)) in parts


@pytest.mark.parametrize(
    ("given", "hides"),
    [
        (config(4096), False),
        (config(1000), False),
        (config(960), True),
        (config(4096, keys=64), True),
        (config(4096, keys=64, causal=False), False),
        (config(4096, queries=192, warpgroups=3), True),
        (config(768, queries=192, warpgroups=3, causal=False), False),
        (config(256, key_length=320), True),
    ],
)
def test_tiles_are_passed_over_only_where_some_show_nothing_to_a_warpgroup(given, hides):
    """Beyond the last query, or later keys that a causal mask hides."""
    assert _hides_tiles(given) is hides


def test_repeated_visits_come_to_each_tile_once_for_each_head():
    visits = Visits(3, 1, 2, lambda index: 10 - index, Runs(True, True, True)).repeat(2)
    assert [int(visits.tile(index)) for index in range(visits.total)] == [10, 10, 9, 9, 8, 8]
    assert (visits.whole, visits.end_whole, visits.runs) == (2, 4, Runs(True, True, True))
