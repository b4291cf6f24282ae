"""Which tiles the sweep of products with packed weights times."""

import dataclasses

import pytest

from benchmarks.kernels.packed_tiles import candidate_tiles
from pallas_kernels.weight_only.triton import MEASURED, ProductPlan, Tile, tile_problem


@pytest.mark.parametrize(("bits", "groups"), [(4, 32), (8, 1)])
@pytest.mark.parametrize("rows", [1, 16])
def test_candidates_fit_the_product_and_are_few(bits, groups, rows):
    measured = MEASURED[bits, 28672, 4096, 8 if rows == 1 else 16]
    plan = ProductPlan(rows, 4096, 28672, 8 // bits, groups, measured)
    found = candidate_tiles(plan)
    assert measured in found and 10 < len(found) < 60
    assert all(tile_problem(dataclasses.replace(plan, tile=tile)) is None for tile in found)


def test_programs_that_leave_multiprocessors_idle_are_left_out():
    """4096 outputs in blocks of 64 are 64 programs, of which half of the 132 multiprocessors have none."""
    plan = ProductPlan(1, 14336, 4096, 2, 112, Tile(16, 128, 1, 4, 4, 4))
    assert not [tile for tile in candidate_tiles(plan) if 4096 // tile.block_out * tile.ranges < 132 / 1.2]
