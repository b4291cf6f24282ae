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
from pallas_kernels.fp8.formats import E4M3, E5M2, power_of_two_scale
from pallas_kernels.fp8.sources import GIVEN, SWIGLU, SWIGLU_GRADIENTS
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted


def interpret() -> None:
    """Compares every output of the kernels.

    Scales of all magnitudes and of zeros; values that FP8 holds, as the interpreter's own cast drops the carry of a
    rounding.
    """
    let_numpy_index()
    random, size = np.random.default_rng(0), (256, 384)
    shapes = [(size, E4M3), ((3, 256), np.float32), (size[::-1], E4M3), ((2, 384), np.float32)]

    def run(x):
        plain = jax.tree.leaves(blockwise.quantize_both(jnp.asarray(x, jnp.float32)))
        found = launch("quantize_kernel", triton.Plan(*size), shapes, x)
        return list(zip(found, [np.asarray(array).astype(np.float32) for array in plain], strict=True))

    x = random.normal(size=size) * np.exp2(random.integers(-40, 40, (256, 1)) + random.integers(-9, 9, (1, 384)))
    x[128:, :128] = 0
    for found, wanted in run(x)[1::2]:
        np.testing.assert_array_equal(found, wanted)
    held = random.choice([-1.875, -1.0, 1.125, 1.5], size) * np.exp2(random.integers(-3, 4, size))
    for found, wanted in run(held):
        np.testing.assert_array_equal(found, wanted)

    interpret_sources(random, size)
    interpret_tiles(random, size)


def interpret_sources(random, size):
    """FP8 of given values, bit by bit; of computed ones float32, for what they are before the cast."""
    held = random.choice([-1.75, -1.0, 1.25, 1.5], (3, *size)) * np.exp2(random.integers(-3, 4, (3, *size)))
    arrays = [jnp.asarray(array, jnp.float32) for array in held]
    for source, count, scales, dtype in (
        (GIVEN, 1, [0.5], E4M3),
        (GIVEN, 1, [0.5], E5M2),
        (SWIGLU, 2, [0.25], np.float32),
        (SWIGLU_GRADIENTS, 3, [2.0, 0.125], np.float32),
    ):
        plan, tolerance = triton.Plan(*size, width=source.width), 0 if source is GIVEN else 1e-5
        shapes = [(size, dtype), (size[::-1], dtype), (tiles(plan), np.float32)] * len(scales)
        results = launch(source.kernel, plan, shapes, *held[:count], *(np.full(1, scale) for scale in scales))
        for index, (wanted, scale) in enumerate(zip(source.compute(*arrays[:count]), scales, strict=True)):
            values, turned, maxima = results[3 * index : 3 * index + 3]
            scaled = np.asarray((wanted * scale).astype(dtype), np.float32)
            np.testing.assert_allclose(values, scaled, tolerance, tolerance)
            np.testing.assert_array_equal(turned, values.T)
            np.testing.assert_allclose(maxima.max(), jnp.abs(wanted).max(), 1e-5)


def interpret_tiles(random, size):
    """A scale for each tile, and then one for all: the second rounding shows below the normal numbers only."""
    held = random.normal(size=(3, *size)) * np.exp2(random.integers(-9, 4, size))
    arrays, rows = [jnp.asarray(array, jnp.float32) for array in held], 128
    for source, count, limit in ((SWIGLU, 2, 448.0), (SWIGLU_GRADIENTS, 3, 57344.0)):
        plan, results = triton.Plan(*size, width=source.width, limit=limit), source.compute(*arrays[:count])
        shapes = [(size, np.float32), (tiles(plan), np.float32)] * len(results)
        found = launch(source.tiles_kernel, plan, shapes, *held[:count])
        for wanted, values, maxima in zip(results, found[::2], found[1::2], strict=True):
            blocks = np.abs(wanted).reshape(size[0] // rows, rows, plan.column_tiles, plan.width).max(axis=(1, 3))
            np.testing.assert_allclose(maxima, blocks.ravel(), 1e-5)
            scales = np.repeat(np.repeat(power_of_two_scale(blocks, E4M3 if limit == 448 else E5M2), rows, 0), 64, 1)
            np.testing.assert_allclose(values, wanted * scales, 1e-5, 1e-5)
    plan, x = triton.Plan(*size, width=64, limit=448.0), random.choice([-1.75, -1.0, 1.25, 1.5], size)
    maxima = np.exp2(random.integers(-9, 9, tiles(plan))) * 448
    wanted = x * np.repeat(np.repeat(maxima.reshape(2, -1), rows, 0), 64, 1) / 448 / 16
    values, turned = launch("recast_kernel", plan, [(size, E5M2), (size[::-1], E5M2)], x, maxima, np.full(1, 1 / 16))
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(turned, values.T)


def tiles(plan):
    return (plan.rows // 128 * plan.column_tiles,)


def launch(kernel, plan, shapes, *arrays):
    """The results of a kernel on float32 arrays, as float32."""
    from pallas_kernels.fp8 import triton_quantize

    names = {E4M3: "fp8e4nv", E5M2: "fp8e5", np.float32: "fp32"}
    results = [Array(np.ones(shape, dtype), names[dtype]) for shape, dtype in shapes]
    given = [Array(np.asarray(array, np.float32), "fp32") for array in arrays]
    getattr(triton_quantize, kernel)[tiles(plan)](*given, *results, plan=plan)
    return [np.asarray(result.array, np.float32) for result in results]


@needs_triton
def test_the_kernel_rounds_bit_by_bit_as_the_plain_form():
    done = run_interpreted(__spec__.name)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_compiled_for_hopper_it_reads_the_array_once():
    x = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    with lowering_platform("cuda"):
        blocks = compile_for_hopper(triton.quantize_both, x).as_text()
        whole = compile_for_hopper(lambda x: triton.cast_both(GIVEN, [x], E5M2, [jnp.float32(2)])[0][:2], x).as_text()
    for text in (blocks, whole):
        assert text.count('custom_call_target="triton_kernel_call"') == 1 and " fusion(" not in text


@needs_triton
@pytest.mark.parametrize("shape", [(500, 384), (512, 380)])
def test_other_shapes_are_rounded_by_xla(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with lowering_platform("cuda"):
        for function in (triton.quantize_both, lambda x: triton.cast_both(GIVEN, [x], E4M3, [None])):
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
    # Input, three weights, SwiGLU, gradient of the result, gradients of SwiGLU; what the last have with one scale.
    assert text.count('custom_call_target="triton_kernel_call"') == 7 + (3 if recipe == "current" else 0)
    written = re.findall(r"= \(?bf16\[512,384\]\{1,0\}(?:, s8\S+)? ([\w-]+)\(", text[text.index("ENTRY") :])
    assert sorted(set(written)) == ["custom-call", "get-tuple-element"] and written.count("custom-call") == 3


if __name__ == "__main__":
    interpret()
