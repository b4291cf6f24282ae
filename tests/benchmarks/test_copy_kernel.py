"""The kernel that measures memory bandwidth copies every element, and compiles for H200s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.copy_kernel import COLUMNS, CopyTiles, copy
from benchmarks.device import COPIES
from tests.hopper import compile_for_hopper

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
SMALL = CopyTiles(programs=2)
TILE = SMALL.rows * COLUMNS


@pytest.mark.longer
@pytest.mark.parametrize(
    "tiles, cut",
    [
        (2 * (2 * SMALL.ahead + 2) + 1, SMALL),
        (7, CopyTiles(ahead=1, per_program=3)),
        (1, SMALL),
        (3, CopyTiles(per_program=1)),
    ],
    ids=str,
)
def test_every_element_is_copied(tiles, cut):
    """More tiles than slots, and programs that have fewer tiles than others."""
    x = jnp.arange(tiles * TILE, dtype=jnp.float32)
    np.testing.assert_array_equal(copy(x, tiles=cut, interpret=True), x)


@pytest.mark.parametrize("tiles", COPIES, ids=str)
def test_it_compiles_for_an_h200_as_one_kernel(tiles):
    text = compile_for_hopper(
        functools.partial(copy, tiles=tiles), jax.ShapeDtypeStruct((2**29,), jnp.float32)
    ).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "fusion" not in text and " copy(" not in text


@pytest.mark.quick
def test_sizes_that_tiles_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=f"multiple of {TILE}"):
        copy(jnp.ones(TILE + 1))
