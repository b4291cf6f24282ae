"""The kernel that measures memory bandwidth copies every element, and compiles for H200s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.copy_kernel import AHEAD, COLUMNS, ROWS, copy
from tests.hopper import compile_for_hopper

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
TILE = ROWS * COLUMNS


@pytest.mark.longer
@pytest.mark.parametrize("tiles, programs", [(1, 2), (2 * (2 * AHEAD + 2) + 1, 2)])
def test_every_element_is_copied(tiles, programs):
    """More tiles than slots, and programs that have one tile more than others."""
    x = jnp.arange(tiles * TILE, dtype=jnp.float32)
    np.testing.assert_array_equal(copy(x, programs=programs, interpret=True), x)


def test_it_compiles_for_an_h200_as_one_kernel():
    text = compile_for_hopper(copy, jax.ShapeDtypeStruct((2**29,), jnp.float32)).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "fusion" not in text and " copy(" not in text


@pytest.mark.quick
def test_sizes_that_tiles_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=f"multiple of {TILE}"):
        copy(jnp.ones(TILE + 1))
