"""`rotate_into_cache` by Triton: interpreted on the CPU against loops, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.kv_cache_update.test_triton paged`.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, lowering_platform, record_choices
from pallas_kernels.kv_cache_update import triton
from pallas_kernels.kv_cache_update.api import rotate_into_cache
from pallas_kernels.kv_cache_update.request import make_request
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.kv_cache_update.cases import CASES, Case, assert_equal, expected
from tests.pallas_kernels.triton_interpreter import (
    Array,
    let_casts_round,
    let_numpy_index,
    needs_triton,
    run_interpreted,
)

NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "float8_e4m3fn": "fp8e4nv"}


def interpret(name: str) -> None:
    from pallas_kernels.kv_cache_update.triton_kernel import update_kernel

    let_numpy_index()
    let_casts_round()
    case = CASES[name]
    arguments = case.arguments()
    plan = triton.make_plan(make_request(*map(jnp.asarray, arguments), **case.options()))
    joined, *_, keys, values, slots = arguments
    q = np.zeros((*slots.shape, case.heads, case.width), joined.dtype)
    given = (*arguments[:3], slots, keys, values, q, keys, values)
    grid = (slots.size, -(-plan.heads // plan.block_heads))
    update_kernel[grid](*(Array(x, NAMES[str(x.dtype)]) for x in given), plan=plan)
    assert_equal((q, keys, values), expected(case), case)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_loops_give(name):
    done = run_interpreted(__spec__.name, name)
    assert done.returncode == 0, done.stderr[-3000:]


def abstract(case: Case) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.arguments()]


LLAMA = Case(batch=2, heads=32, key_heads=8, width=64, slots=640, dtype="bfloat16")
"""A step of llama3-1b."""


@needs_triton
@pytest.mark.parametrize(("slot_axis", "cache"), [(1, None), (2, None), (1, "float8_e4m3fn")])
def test_compiled_for_hopper_it_is_one_call_that_updates_the_cache_in_place(slot_axis, cache):
    case = Case(**{**vars(LLAMA), "slot_axis": slot_axis, "cache_dtype": cache})
    with lowering_platform("cuda"):
        call = jax.jit(functools.partial(rotate_into_cache, **case.options()), donate_argnums=(3, 4))
        text = compile_for_hopper(call, *abstract(case)).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert "output_to_operand_aliasing={{1}: (4, {}), {2}: (5, {})}" in text
    assert not re.findall(r" (?:fusion|copy|copy-start)\(", text)


@needs_triton
def test_in_a_scan_over_layers_the_call_is_not_merged_with_slices_of_their_caches():
    """XLA would compute it twice, and give it a result that is not its operand: the rest of the cache would be lost."""

    def layers(joined, cos, sin, keys, values, slots):
        def layer(joined, cache):
            q, *cache = rotate_into_cache(joined, cos, sin, *cache, slots, **LLAMA.options())
            return jnp.concatenate([q, joined[:, :, 32:]], 2), tuple(cache)

        return jax.lax.scan(layer, joined, (keys, values))

    arguments = abstract(LLAMA)
    arguments[3:5] = [jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for x in arguments[3:5]]
    with lowering_platform("cuda"):
        text = compile_for_hopper(jax.jit(layers, donate_argnums=(3, 4)), *arguments).as_text()
    (computation,) = [part for part in text.split("\n\n") if 'target="triton_kernel_call_ffi"' in part]
    assert computation.count('target="triton_kernel_call_ffi"') == 1
    assert "dynamic-slice-fusion" not in computation.split("(")[0]


@needs_triton
def test_the_choice_and_its_reasons():
    call = functools.partial(rotate_into_cache, **LLAMA.options())
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(call, *abstract(LLAMA))
        jax.eval_shape(call, *abstract(Case(**{**vars(LLAMA), "cache_dtype": "float8_e5m2"})))
    assert [choice.backend for choice in choices] == ["triton", "xla"]
    assert choices[1].refused[0][1].endswith("got float8_e5m2")
    with pytest.raises(NotSupported, match="compute capability"):
        jax.eval_shape(functools.partial(call, implementation="triton"), *abstract(LLAMA))


if __name__ == "__main__":
    interpret(sys.argv[1])
