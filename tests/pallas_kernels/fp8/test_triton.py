"""The rounding kernel: interpreted on the CPU against the plain form, bit by bit, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.fp8.test_triton`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compiler_options import step_options
from pallas_kernels import empty_fp8_state, fp8_multiply, fp8_swiglu_mlp, lowering_platform
from pallas_kernels.fp8 import blockwise, triton
from pallas_kernels.fp8.formats import E4M3, E5M2
from pallas_kernels.fp8.sources import GIVEN, SWIGLU, SWIGLU_GRADIENTS
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted


def interpret() -> None:
    """Compares every output of the kernels.

    Scales of all magnitudes and of zeros; values that FP8 holds, as the interpreter's own cast drops the carry of a
    rounding.
    """
    from pallas_kernels.fp8.triton_quantize import quantize_kernel

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

    interpret_sources(random, size)


def interpret_sources(random, size):
    """FP8 of given values, bit by bit; of computed ones float32, for what they are before the cast."""
    from pallas_kernels.fp8 import triton_quantize

    held = random.choice([-1.75, -1.0, 1.25, 1.5], (3, *size)) * np.exp2(random.integers(-3, 4, (3, *size)))
    arrays = jnp.asarray(held, jnp.float32)
    for source, count, scales, dtype, name in (
        (GIVEN, 1, [0.5], E4M3, "fp8e4nv"),
        (GIVEN, 1, [0.5], E5M2, "fp8e5"),
        (SWIGLU, 2, [0.25], np.float32, "fp32"),
        (SWIGLU_GRADIENTS, 3, [2.0, 0.125], np.float32, "fp32"),
    ):
        plan, results = triton.Plan(*size, source.width), []
        for _ in scales:
            results += [Array(np.ones(shape, dtype), name) for shape in (size, size[::-1])]
            results.append(Array(np.full(size[0] // 128 * plan.column_tiles, np.nan, np.float32), "fp32"))
        given = [Array(array.astype(np.float32), "fp32") for array in held[:count]]
        given += [Array(np.float32([scale]), "fp32") for scale in scales]
        getattr(triton_quantize, source.kernel)[(size[0] // 128 * plan.column_tiles,)](*given, *results, plan=plan)
        plain = triton.cast_both(source, arrays[:count], [jnp.float32(scale) for scale in scales], dtype)
        tolerance = 0 if source is GIVEN else 1e-5
        for index, wanted in enumerate(plain):
            values, turned, maxima = (np.asarray(r.array, np.float32) for r in results[3 * index : 3 * index + 3])
            np.testing.assert_allclose(values, np.asarray(wanted.values, np.float32), tolerance, tolerance)
            np.testing.assert_array_equal(turned, values.T)
            np.testing.assert_allclose(maxima.max(), wanted.amax, 1e-5)


@needs_triton
def test_the_kernel_rounds_bit_by_bit_as_the_plain_form():
    done = run_interpreted(__spec__.name)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_compiled_for_hopper_it_reads_the_array_once():
    x = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    with lowering_platform("cuda"):
        blocks = compile_for_hopper(triton.quantize_both, x).as_text()
        whole = compile_for_hopper(lambda x: triton.cast_both(GIVEN, [x], [jnp.float32(2)], E5M2)[0][:2], x).as_text()
    for text in (blocks, whole):
        assert text.count('custom_call_target="triton_kernel_call"') == 1 and " fusion(" not in text


@needs_triton
@pytest.mark.parametrize("shape", [(500, 384), (512, 380)])
def test_other_shapes_are_rounded_by_xla(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with lowering_platform("cuda"):
        for function in (triton.quantize_both, lambda x: triton.cast_both(GIVEN, [x], [jnp.float32(2)], E4M3)):
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


@needs_triton
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_wide_arrays_of_an_mlp_are_written_in_fp8_only(recipe):
    """Two results of matmuls, and the gradient of SwiGLU's, are all that is written of [rows, F] in bfloat16."""
    rows, width, wide = 512, 128, 384

    def both(x, gate, up, down):
        states = [empty_fp8_state() if recipe == "delayed" else None] * 3
        out, pull = jax.vjp(lambda *a: fp8_swiglu_mlp(*a, recipe=recipe, states=states), x, gate, up, down)
        return pull(out)

    x, first, last = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, width), (width, wide), (wide, width)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, first, first, last, options=step_options()).as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 9
    # Input, three weights, SwiGLU, gradient of the result, gradients of SwiGLU.
    assert text.count('custom_call_target="triton_kernel_call"') == 7
    written = re.findall(r"= .*?bf16\[512,384\].*? ([\w-]+)\(", text[text.index("ENTRY") :])
    assert sorted(set(written)) == ["custom-call", "get-tuple-element"] and written.count("custom-call") == 3


if __name__ == "__main__":
    interpret()
