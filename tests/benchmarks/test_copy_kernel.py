"""The kernel that measures memory bandwidth: interpreted on the CPU, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.benchmarks.test_copy_kernel`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

pytestmark = needs_triton


def interpret() -> None:
    from benchmarks.kernels.copy_kernel import ELEMENTS, copy_kernel

    let_numpy_index()
    x = np.arange(3 * ELEMENTS, dtype=np.float32)
    y = np.full_like(x, -1)
    copy_kernel[(3,)](Array(x, "fp32"), Array(y, "fp32"), elements=ELEMENTS)
    np.testing.assert_array_equal(y, x)


@pytest.mark.exhaustive
def test_every_element_is_copied():
    done = run_interpreted(__spec__.name)
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_for_an_h200_it_is_one_kernel():
    from benchmarks.kernels.copy_kernel import copy

    text = compile_for_hopper(copy, jax.ShapeDtypeStruct((2**29,), jnp.float32)).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert "fusion" not in text and " copy(" not in text


@pytest.mark.quick
@pytest.mark.parametrize("x", [jnp.ones(513), jnp.ones((2, 512)), jnp.ones(512, jnp.bfloat16)], ids=str)
def test_arrays_that_programs_do_not_divide_are_refused(x):
    from benchmarks.kernels.copy_kernel import copy

    with pytest.raises(ValueError, match="multiple of 512"):
        copy(x)


if __name__ == "__main__":
    interpret()
