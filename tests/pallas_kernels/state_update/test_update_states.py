"""`update_states` by XLA against loops, by Triton interpreted on the CPU, and compiled for an H200."""

import re
import sys

import jax
import numpy as np
import pytest

from pallas_kernels import NotSupported, lowering_platform, record_choices, update_states
from pallas_kernels.state_update import triton
from pallas_kernels.state_update.request import make_request
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.state_update.cases import CASES, Case, assert_equal
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

NAMES = {"float16": "fp16", "float32": "fp32", "int32": "i32"}


def interpret(name: str) -> None:
    from pallas_kernels.state_update.triton_kernel import update_kernel

    let_numpy_index()
    case = CASES[name]
    given = case.arguments()
    plan = triton.make_plan(make_request(**given, **case.options()))
    states = given["states"]
    out = np.zeros(given["v"].shape, given["v"].dtype)
    decays = given["log_decay"]
    arrays = (given["q"], given["k"], given["v"], decays, decays if given["beta"] is None else given["beta"])
    places = np.where(given["begins"], -1 - given["slots"], given["slots"]).astype(np.int32)
    grid = (case.rows, case.heads, -(-case.values // plan.block_values))
    update_kernel[grid](*(Array(x, NAMES[str(x.dtype)]) for x in (*arrays, places, states, out, states)), plan=plan)
    assert_equal((out, states), case)


@pytest.mark.parametrize("name", CASES)
def test_xla_gives_what_loops_give(name):
    case = CASES[name]
    assert_equal(update_states(**case.arguments(), **case.options()), case)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_loops_give(name):
    done = run_interpreted(__spec__.name, name)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_compiled_for_hopper_it_is_one_call_that_updates_the_states_in_place():
    case = Case(rows=64, slots=64, key_heads=16, heads=32, keys=128, values=128)
    arguments = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.arguments().items()}

    def call(states, others):
        return update_states(states, **others, **case.options())

    states = arguments.pop("states")
    with lowering_platform("cuda"), record_choices() as choices:
        compiled = compile_for_hopper(jax.jit(call, donate_argnums=0), states, arguments)
    assert [choice.backend for choice in choices] == ["triton"]
    text = compiled.as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert "output_to_operand_aliasing={{1}: (6, {})}" in text
    assert not re.findall(r"f32\[64,32,128,128\]\S* (?:fusion|copy|copy-start)\(", text)


def test_wrong_arguments_are_told():
    case = CASES["delta"]
    given = case.arguments()
    with pytest.raises(ValueError, match=r"states must be \[slots, value heads, key width, value width\]"):
        update_states(**{**given, "states": given["states"][..., :3]}, **case.options())
    with pytest.raises(ValueError, match="log_decay must have a number for each value head"):
        update_states(**{**given, "log_decay": given["log_decay"][:1]}, **case.options())
    with pytest.raises(NotSupported, match=r"needs an NVIDIA GPU|pip install"):
        update_states(**given, **case.options(), implementation="triton")


if __name__ == "__main__":
    interpret(sys.argv[1])
