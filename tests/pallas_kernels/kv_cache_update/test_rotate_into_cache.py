"""`rotate_into_cache` by XLA computes what loops over tokens compute, and says which rule wrong arguments break."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_cache_update.api import rotate_into_cache
from tests import shapes
from tests.pallas_kernels.kv_cache_update.cases import CASES, Case, assert_equal, expected


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_rotated_and_written_and_those_past_the_last_slot_skipped(name):
    case = CASES[name]
    found = rotate_into_cache(*map(jnp.asarray, case.arguments()), **case.options())
    assert_equal(found, expected(case), case)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (2, 1, 7, 32), r"N \+ 2 K heads, 4 \+ 2 x 2 by num_heads"),
        (0, (3, 1, 8, 32), "same B rows and head dim H"),
        (1, (2, 1, 32), r"cos and sin must be \[B, T, H / 2\]"),
        (3, (2, 2, 11, 32), "keys and values"),
        (5, (2, 2), r"slots must be integers \[B, T\], here \[2, 1\]"),
    ],
)
def test_wrong_shapes_are_explained(index, shape, message):
    arguments = [jnp.asarray(x) for x in Case().arguments()]
    arguments[index] = jnp.zeros(shape, arguments[index].dtype)
    with shapes.unchecked(), pytest.raises(ValueError, match=message):
        rotate_into_cache(*arguments, **Case().options())


def test_a_wrong_slot_axis_is_explained():
    with pytest.raises(ValueError, match="slot_axis must be 1 .* got 3"):
        jax.eval_shape(functools.partial(rotate_into_cache, num_heads=4, slot_axis=3), *Case().arguments())
