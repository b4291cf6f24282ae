"""Which tiles the sweep of products with packed weights times."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.packed_tiles import candidate_tiles, fragment_tiles
from pallas_kernels import PackedWeight
from pallas_kernels.target import Target
from pallas_kernels.weight_only import fragments
from pallas_kernels.weight_only.formats import IntegerFormat, TwoOfFourFormat
from pallas_kernels.weight_only.request import PackedMatmulRequest
from pallas_kernels.weight_only.rounding_grid import Grid
from pallas_kernels.weight_only.triton import MEASURED, ProductPlan, Tile, tile_problem

S = jax.ShapeDtypeStruct
WEIGHTS = {
    4: ({"q": S((28672, 4096), jnp.int4), "scales": S((28672, 32), jnp.bfloat16)}, IntegerFormat(Grid(4, 128))),
    16: ({"values": S((28672, 2048), jnp.bfloat16), "kept": S((28672, 1024), jnp.uint4)}, TwoOfFourFormat()),
}


@pytest.mark.parametrize(("bits", "outputs", "groups"), [(4, 14336, 32), (8, 28672, 1)])
@pytest.mark.parametrize("rows", [1, 16])
def test_candidates_fit_the_product_and_are_few(bits, outputs, groups, rows):
    measured = MEASURED[bits, outputs, 4096, 8 if rows == 1 else 16]
    assert isinstance(measured, Tile)
    plan = ProductPlan(rows, 4096, outputs, 8 // bits, groups, measured)
    found = candidate_tiles(plan)
    assert measured in found and 10 < len(found) < 60
    assert all(tile_problem(dataclasses.replace(plan, tile=tile)) is None for tile in found)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("rows", [1, 16])
def test_candidates_of_the_other_kernel_fit_the_product_and_are_few(bits, rows):
    x = S((rows, 4096), jnp.bfloat16)
    weight = PackedWeight(*WEIGHTS[bits], (4096,), (28672,))
    request = PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0)))
    found = list(fragment_tiles(request))
    assert MEASURED[bits, 28672, 4096, 8 if rows == 1 else 16] in found and 5 < len(found) < 60
    assert all(fragments.tile_problem(fragments.make_plan(request, tile)) is None for tile in found)


def test_programs_that_leave_multiprocessors_idle_are_left_out():
    """4096 outputs in blocks of 64 are 64 programs, of which half of the 132 multiprocessors have none."""
    plan = ProductPlan(1, 14336, 4096, 2, 112, Tile(16, 128, 1, 4, 4, 4))
    assert not [tile for tile in candidate_tiles(plan) if 4096 // tile.block_out * tile.ranges < 132 / 1.2]
