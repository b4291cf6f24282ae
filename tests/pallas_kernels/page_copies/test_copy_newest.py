"""`copy_newest`: XLA's form against loops, and Triton's against XLA's, interpreted and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.page_copies.test_copy_newest bfloat16`.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowering_platform
from pallas_kernels.attention import triton as attention_triton
from pallas_kernels.attention.tilings import Tiling
from pallas_kernels.page_copies import triton
from pallas_kernels.page_copies.api import BLOCK, copy_newest
from pallas_kernels.page_copies.request import make_request
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.page_copies.cases import (
    CASES,
    HEADS,
    LENGTHS,
    PAGE,
    PAGES,
    ROWS,
    VALUE_WIDTH,
    check,
    make_arrays,
)
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted
from tests.shapes import unchecked

NAMES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "float8_e4m3fn": "fp8e4nv"}


def interpret(dtype: str) -> None:
    from pallas_kernels.page_copies.triton_kernel import copy_kernel

    let_numpy_index()
    arrays = make_arrays(dtype)
    plan = triton.make_plan(make_request(*map(jnp.asarray, arrays), CASES[dtype]))
    copies = [np.full((ROWS, plan.width, *x.shape[2:]), np.nan, jnp.dtype(CASES[dtype])) for x in arrays[:2]]
    grid = (-(-plan.width // plan.slots), ROWS)
    copy_kernel[grid](*(Array(x, NAMES[str(x.dtype)]) for x in (*arrays, *copies)), plan=plan)
    check(copies, arrays, CASES[dtype])
    untouched = plan.width - LENGTHS[2] - BLOCK - plan.slots
    assert np.isnan(np.asarray(copies[0][2, :untouched], np.float32)).all() and untouched > 0


@pytest.mark.parametrize("dtype", CASES)
def test_tokens_lie_at_the_end_of_their_rows(dtype):
    arrays = make_arrays(dtype)
    check([np.asarray(x) for x in copy_newest(*arrays, dtype=CASES[dtype])], arrays, CASES[dtype])


@needs_triton
@pytest.mark.parametrize("dtype", CASES)
def test_the_kernel_gives_what_loops_give_and_skips_the_slots_far_before_the_first_token(dtype):
    done = run_interpreted(__spec__.name, dtype)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("dtype", CASES)
def test_compiled_for_hopper_it_is_one_call(dtype):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_arrays(dtype)]
    with lowering_platform("cuda"):
        call = jax.jit(functools.partial(copy_newest, dtype=CASES[dtype]))
        text = compile_for_hopper(call, *shapes).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1 and " fusion(" not in text


def test_no_tile_of_attention_reaches_beyond_the_slots_that_are_written():
    """A tile with a visible key may have as many hidden ones before it, which must not be NaN."""
    (field,) = (field for field in dataclasses.fields(Tiling) if field.name == "forward_keys")
    by_triton = [
        tiling.forward.key_block for tilings in attention_triton._TILINGS.values() for tiling in tilings.values()
    ]
    assert max(*field.metadata["values"], *by_triton) <= BLOCK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((PAGES, PAGE + 1, HEADS, VALUE_WIDTH), np.float32)}, "the same pages"),
        ({"lengths": np.zeros(ROWS + 1, np.int32)}, r"lengths \[R\]"),
    ],
)
def test_arguments_that_break_a_rule_are_told(change, message):
    arguments = dict(zip(("keys", "values", "table", "lengths"), make_arrays("float32"), strict=True)) | change
    with unchecked(), pytest.raises(ValueError, match=message):
        copy_newest(**arguments, dtype=np.float32)


if __name__ == "__main__":
    interpret(sys.argv[1])
