"""Shapes of attention drawn at random are valid, different, and the same for the same seed."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.attention.attention import Work
from benchmarks.attention.attention_random import default_backend, draw_works, row_of
from pallas_kernels import lowering_platform


def test_drawn_shapes_repeat_with_the_seed_and_are_valid():
    works = draw_works(40, seed=3)
    assert works == draw_works(40, seed=3)
    assert works[:10] == draw_works(10, seed=3)
    assert works != draw_works(40, seed=4)
    assert len(set(works)) == 40
    for work in works:
        assert work.heads % work.kv_heads == 0
        assert work.window is None or work.window < work.length
        assert 4096 <= work.batch * work.length <= 16384 + work.length


def test_a_row_has_ratios_only_where_both_were_measured():
    work = draw_works(1, seed=0)[0]
    measured = {"ours": {"forward": 1e-3, "both": 4e-3}, "cudnn": {"forward": 2e-3, "both": 3e-3}, "difference": 1e-3}
    measured["default"] = "cudnn"
    row = row_of(work, measured, 0, "a GPU")
    assert (row["forward_ratio"], row["both_ratio"]) == (2.0, 0.75)
    assert row["default"] == "cudnn"
    assert row["ours_both_tflops"] == 3.5 * work.flops() / 4e-3 / 1e12
    failed = row_of(work, measured | {"cudnn": "no plan"}, 0, "a GPU")
    assert failed["forward_ratio"] is None
    assert failed["cudnn_error"] == "no plan"


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.parametrize(("head_dim", "backend"), [(128, "mosaic"), (256, "cudnn")])
def test_the_default_backend_is_the_one_that_calls_take(head_dim, backend):
    work = Work(1, 4096, 8, 8, head_dim)
    x = jax.ShapeDtypeStruct((work.batch, work.length, work.heads, work.head_dim), jnp.bfloat16)
    with lowering_platform("cuda"):
        assert default_backend(work, (x, x, x), None) == backend
