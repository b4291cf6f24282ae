"""The rounding kernel: interpreted on the CPU against the plain form, bit by bit, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.fp8.test_triton`.
"""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compiler_options import step_options
from pallas_kernels import fp8_multiply, lowering_platform
from pallas_kernels.fp8 import blockwise, triton
from pallas_kernels.fp8.formats import E4M3, E5M2
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted


def interpret() -> None:
    """Compares every output of the kernels.

    Scales of all magnitudes and of zeros; values that FP8 holds, as the interpreter's own cast drops the carry of a
    rounding.
    """
    from pallas_kernels.fp8.triton_quantize import cast_kernel, quantize_kernel

    let_numpy_index()
    random, size = np.random.default_rng(0), (256, 384)
    shapes = [(size, E4M3), ((3, 256), np.float32), (size[::-1], E4M3), ((2, 384), np.float32)]
    names = {E4M3: "fp8e4nv", np.float32: "fp32"}

    def run(x):
        results = [Array(np.ones(shape, dtype), names[dtype]) for shape, dtype in shapes]
        quantize_kernel[(6,)](Array(np.asarray(x, np.float32), "fp32"), *results, plan=triton.Plan(*size))
        plain = jax.tree.leaves(blockwise.quantize_both(jnp.asarray(x, jnp.float32)))
        found = [result.array.astype(np.float32) for result in results]
        return list(zip(found, [np.asarray(array).astype(np.float32) for array in plain], strict=True))

    x = random.normal(size=size) * np.exp2(random.integers(-40, 40, (256, 1)) + random.integers(-9, 9, (1, 384)))
    x[128:, :128] = 0
    for found, wanted in run(x)[1::2]:
        np.testing.assert_array_equal(found, wanted)
    held = random.choice([-1.875, -1.0, 1.125, 1.5], size) * np.exp2(random.integers(-3, 4, size))
    for found, wanted in run(held):
        np.testing.assert_array_equal(found, wanted)

    held = random.choice([-1.75, -1.0, 1.25, 1.5], size) * np.exp2(random.integers(-3, 4, size))
    for dtype, name in ((E4M3, "fp8e4nv"), (E5M2, "fp8e5")):
        results = [Array(np.ones(shape, dtype), name) for shape in (size, size[::-1])]
        scale = Array(np.float32([0.5]), "fp32")
        cast_kernel[(6,)](Array(held.astype(np.float32), "fp32"), scale, *results, plan=triton.Plan(*size))
        plain = triton.cast_both(jnp.asarray(held, jnp.float32), jnp.float32(0.5), dtype)
        for result, wanted in zip(results, plain, strict=True):
            np.testing.assert_array_equal(result.array.astype(np.float32), np.asarray(wanted).astype(np.float32))


@needs_triton
def test_the_kernel_rounds_bit_by_bit_as_the_plain_form():
    done = run_interpreted(__spec__.name)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_compiled_for_hopper_it_reads_the_array_once():
    x = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    with lowering_platform("cuda"):
        blocks = compile_for_hopper(triton.quantize_both, x).as_text()
        whole = compile_for_hopper(lambda x: triton.cast_both(x, jnp.float32(2), E5M2), x).as_text()
    for text in (blocks, whole):
        assert text.count('custom_call_target="triton_kernel_call"') == 1 and " fusion(" not in text


@needs_triton
@pytest.mark.parametrize("shape", [(500, 384), (512, 380)])
def test_other_shapes_are_rounded_by_xla(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with lowering_platform("cuda"):
        for function in (triton.quantize_both, lambda x: triton.cast_both(x, jnp.float32(2), E4M3)):
            assert "triton_kernel_call" not in compile_for_hopper(function, x).as_text()


@needs_triton
def test_every_operand_of_a_product_with_one_scale_is_rounded_by_one_kernel():
    """Two weights: the input, both weights and both gradients, each rounded and turned; nothing is transposed."""

    def both(x, weights):
        outs, pull = jax.vjp(lambda x, w: fp8_multiply(x, w), x, weights)
        return pull(outs)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 128)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, (w, w), options=step_options()).as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 5
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 6 and " transpose(" not in text


if __name__ == "__main__":
    interpret()
