"""The norms' gradients by Triton: interpreted on the CPU against the plain form, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.normalization.test_triton 10` for a LayerNorm whose input is not
returned beside its output.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_norm, lowering_platform, rms_norm
from pallas_kernels.normalization.triton_launch import NormKernelPlan
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

WIDTH = 48


def norm(centered, x, gain, bias):
    """(normalised, x)."""
    if centered:
        return layer_norm(x, gain, bias, epsilon=1e-5, return_input=True)
    return rms_norm(x, gain, epsilon=1e-5, return_input=True)


def interpret(centered: bool, past: bool) -> None:
    """Rows that no number of programs or rows of a block divides, of very different sizes, with a mean of their own."""
    from pallas_kernels.normalization.triton_kernel import gradient_kernel

    let_numpy_index()
    random = np.random.default_rng(0)
    rows = 23
    x, d_out, d_past = (random.normal(size=(rows, WIDTH)).astype(np.float16) for _ in range(3))
    x = (x * np.exp2(random.integers(-4, 5, (rows, 1))) + random.normal(size=(rows, 1))).astype(np.float16)
    gain = (1 + random.normal(size=WIDTH)).astype(np.float32)
    bias = np.ones(WIDTH, np.float32)
    plan = NormKernelPlan(rows, WIDTH, centered, past, 1e-5, 3)
    sums = np.full((1 + centered, 3, WIDTH), np.nan, np.float32)
    given = [Array(x, "fp16"), Array(gain, "fp32"), Array(d_out, "fp16"), Array(d_past, "fp16")]
    found = [Array(np.full_like(x, np.nan), "fp16"), Array(sums, "fp32")]
    gradient_kernel[(3,)](*given, *found, plan=plan)

    arrays = (jnp.asarray(x), jnp.asarray(gain), jnp.asarray(bias))
    pullback = jax.vjp(lambda *arrays: norm(centered, *arrays), *arrays)[1]
    wanted = pullback((jnp.asarray(d_out), jnp.asarray(d_past if past else 0 * d_past)))
    np.testing.assert_allclose(found[0].array.astype(np.float32), wanted[0], rtol=2e-3, atol=2e-3)
    for number, total in enumerate(found[1].array.sum(1)):
        np.testing.assert_allclose(total, wanted[1 + number], rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("case", ["10", "11", "01", "00"])
def test_gradients_are_those_of_the_plain_form(case):
    done = run_interpreted(__spec__.name, case)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(rows, dtype=jnp.bfloat16):
    """The gradients of LayerNorm of [rows, 768] and of its input beside it; the text of the program."""
    array = jax.ShapeDtypeStruct((rows, 768), dtype)
    vector = jax.ShapeDtypeStruct((768,), jnp.float32)

    def gradients(x, gain, bias, d_out, d_past):
        return jax.vjp(lambda *arrays: norm(True, *arrays), x, gain, bias)[1]((d_out, d_past))

    with lowering_platform("cuda"):
        return compile_for_hopper(gradients, array, vector, vector, array, array).as_text()


@needs_triton
def test_compiled_for_hopper_one_kernel_reads_and_writes_whole_arrays():
    text = compiled(4096)
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert "bf16[4096,768]{1,0} fusion(" not in text and "f32[4096" not in text


@pytest.mark.longer
@needs_triton
def test_other_arrays_are_for_xla():
    assert "triton_kernel_call" not in compiled(64)
    assert "triton_kernel_call" not in compiled(4096, jnp.float32)


if __name__ == "__main__":
    interpret(*(digit == "1" for digit in sys.argv[1]))
