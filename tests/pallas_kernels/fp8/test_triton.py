"""The rounding kernel: interpreted on the CPU against the plain form, bit by bit, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.fp8.test_triton maxima`.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.distributed.xla_options import step_options
from pallas_kernels import (
    NormalisedInput,
    empty_fp8_state,
    fp8_multiply,
    fp8_swiglu_mlp,
    lowering_platform,
    rms_norm,
)
from pallas_kernels.fp8 import blockwise, triton
from pallas_kernels.fp8.formats import E4M3, E5M2, power_of_two_scale
from pallas_kernels.fp8.sources import IDENTITY, NORM, SWIGLU, SWIGLU_GRADIENTS
from pallas_kernels.fp8.state import AmaxHistory, state_gradient
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

pytestmark = pytest.mark.longer  # a few seconds each


def interpret_blockwise(random, size):
    """Scales of all magnitudes, of zeros and of infinities; values that FP8 holds exactly, because the interpreter's
    own cast loses the carry when it rounds.
    """

    def run(x, shared, programs):
        turned = (2, 3 if shared else 384)
        shapes = [(size, E4M3), ((3, 256), np.float32), (size[::-1], E4M3), (turned, np.float32)]
        plain = jax.tree.leaves(blockwise.quantize_both(IDENTITY, [jnp.asarray(x, jnp.float32)], shared))
        found = launch("quantize_kernel", triton.BlocksPlan(*size, shared, programs, stages=1), shapes, x)
        return list(zip(found, [np.asarray(array).astype(np.float32) for array in plain], strict=True))

    x = random.normal(size=size) * np.exp2(random.integers(-40, 40, (256, 1)) + random.integers(-9, 9, (1, 384)))
    x[128:, :128] = 0
    x[5, 200] = np.inf
    held = random.choice([-1.875, -1.0, 1.125, 1.5], size) * np.exp2(random.integers(-3, 4, size))
    for shared, programs in ((False, 6), (True, 4)):
        for found, wanted in run(x, shared, programs)[1::2]:
            np.testing.assert_array_equal(found, wanted)
        for found, wanted in run(held, shared, programs):
            np.testing.assert_array_equal(found, wanted)


def interpret_sources(random, size):
    """FP8 of given values, bit by bit; of computed ones float32, for what they are before the cast."""
    held = random.choice([-1.75, -1.0, 1.25, 1.5], (3, *size)) * np.exp2(random.integers(-3, 4, (3, *size)))
    arrays = [jnp.asarray(array, jnp.float32) for array in held]
    normed = [arrays[0], jnp.linspace(0.5, 3, size[0]), jnp.linspace(-2, 2, size[1])]
    for source, given, scales, dtype in (
        (IDENTITY, arrays[:1], [0.5], E4M3),
        (IDENTITY, arrays[:1], [0.5], E5M2),
        (SWIGLU, arrays[:2], [0.25], np.float32),
        (SWIGLU_GRADIENTS, arrays, [2.0, 0.125], np.float32),
        (NORM, normed, [4.0], np.float32),
    ):
        tolerance = 0 if source is IDENTITY else 1e-5
        limit = 57344.0 if dtype is E5M2 else 448.0
        plan = triton.QuantizePlan(*size, source.width, limit, history_start=3, history=3)
        # Of what was seen only the last three are this role's.
        histories = [[9e9, 9e9, 9e9, limit / scale / 2, 0, limit / scale] for scale in scales]
        shapes = [(size, dtype), (size[::-1], dtype), ((plan.programs,), np.float32), ((1,), np.float32)] * len(scales)
        results = launch(source.kernel, plan, shapes, *given, *histories)
        for index, (wanted, scale) in enumerate(zip(source.compute(*given), scales, strict=True)):
            values, turned, maxima, inverse = results[4 * index : 4 * index + 4]
            scaled = np.asarray((wanted * scale).astype(dtype), np.float32)
            np.testing.assert_allclose(values, scaled, tolerance, tolerance)
            np.testing.assert_array_equal(turned, values.T)
            np.testing.assert_allclose(maxima.max(), jnp.abs(wanted).max(), 1e-5)
            assert inverse == 1 / scale
    plan = triton.QuantizePlan(*size, limit=448.0, default_amax=448.0 * 4)
    shapes = [(size, E4M3), (size[::-1], E4M3), ((plan.programs,), np.float32), ((1,), np.float32)]
    assert launch("cast_kernel", plan, shapes, arrays[0], [0.0])[3] == 4, "nothing seen yet"


def interpret_tiles(random, size):
    """A scale for each tile, and then one for all: the second rounding shows below the normal numbers only."""
    held = random.normal(size=(3, *size)) * np.exp2(random.integers(-9, 4, size))
    arrays = [jnp.asarray(array, jnp.float32) for array in held]
    normed = [arrays[0], jnp.linspace(0.5, 3, size[0]), jnp.linspace(-2, 2, size[1])]
    for source, given, limit in (
        (SWIGLU, arrays[:2], 448.0),
        (SWIGLU_GRADIENTS, arrays, 57344.0),
        (NORM, normed, 448.0),
    ):
        plan = triton.QuantizePlan(*size, source.width, limit)
        results = source.compute(*given)
        rows = 128
        shapes = [(size, np.float32), ((plan.programs,), np.float32)] * len(results)
        found = launch(source.tiles_kernel, plan, shapes, *given)
        for wanted, values, maxima in zip(results, found[::2], found[1::2], strict=True):
            blocks = np.abs(wanted).reshape(size[0] // rows, rows, plan.column_tiles, plan.width).max(axis=(1, 3))
            np.testing.assert_allclose(maxima, blocks.ravel(), 1e-5)
            scales = power_of_two_scale(blocks, E4M3 if limit == 448 else E5M2)
            scales = np.repeat(np.repeat(scales, rows, 0), plan.width, 1)
            np.testing.assert_allclose(values, wanted * scales, 1e-5, 1e-5)
    plan = triton.QuantizePlan(*size, 64, limit=448.0)
    x = random.choice([-1.75, -1.0, 1.25, 1.5], size)
    maxima = np.exp2(random.integers(-9, 9, plan.programs)) * 448
    wanted = x * np.repeat(np.repeat(maxima.reshape(-1, plan.column_tiles), 128, 0), 64, 1) / 448 / 16
    shapes = [(size, E5M2), (size[::-1], E5M2), ((1,), np.float32)]
    values, turned, inverse = launch("recast_kernel", plan, shapes, x, maxima, [448.0 * 16])
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(turned, values.T)
    assert inverse == 16


def interpret_blocks(random, size):
    """SwiGLU, its gradients, RMSNorm and a weight; rows need no cast to be compared, their transposes are in FP8."""
    held = [jnp.asarray(random.normal(size=size), jnp.float32) for _ in range(3)]
    normed = [held[0], jnp.linspace(0.5, 3, size[0]), jnp.linspace(-2, 2, size[1])]
    for source, given, shared in ((SWIGLU, held[:2], True), (SWIGLU_GRADIENTS, held, False), (NORM, normed, True)):
        results = source.compute(*given)
        plain = blockwise.quantize_both(source, given, shared)
        inverses = [(size[1] // 128, size[0]), (size[0] // 128, size[1] // 128 if shared else size[1])]
        shapes = [(size, np.float32), (inverses[0], np.float32), (size[::-1], E4M3), (inverses[1], np.float32)]
        plan = triton.BlocksPlan(*size, shared, programs=4, stages=1)
        found = launch(source.blocks_kernel, plan, shapes * len(results), *given)
        for index, wanted in enumerate(results):
            values, inverse, turned, turned_inverse = found[4 * index : 4 * index + 4]
            np.testing.assert_array_equal(inverse, plain[index][0].inverse_scale)
            np.testing.assert_allclose(values * np.repeat(inverse.T, 128, 1), wanted, 1e-4, 1e-6)
            turned_values, turned_scale = plain[index][1]
            np.testing.assert_array_equal(turned_inverse, turned_scale)
            # Values that differ in their last bit may be rounded to neighbouring ones.
            np.testing.assert_allclose(turned, np.asarray(turned_values, np.float32), 2.0**-3, 2.0**-9)
            assert np.mean(turned == np.asarray(turned_values, np.float32)) > 0.999
    wanted = blockwise.quantize_weight(held[0])
    shapes = [(size, np.float32), (size[::-1], np.float32), (wanted.inverse_scale.shape, np.float32)]
    values, turned, inverse = launch("weight_kernel", triton.QuantizePlan(*size, limit=448.0), shapes, held[0])
    np.testing.assert_array_equal(inverse, wanted.inverse_scale)
    np.testing.assert_array_equal(values * np.repeat(np.repeat(inverse, 128, 0), 128, 1), held[0])
    np.testing.assert_array_equal(turned, values.T)


def interpret_maxima(random, size):
    """As the plain form: more than are read at once, as few as one."""
    maxima = [np.abs(random.normal(size=count)).astype(np.float32) for count in (5000, 1, 130)]
    (found,) = launch("maxima_kernel", triton.MaximaPlan(5000, 1, 130, history=5), [((3, 5), np.float32)], *maxima)
    np.testing.assert_array_equal(found, state_gradient(jnp.ones((3, 5)), [jnp.asarray(x) for x in maxima]))


def launch(kernel, plan, shapes, *arrays):
    """The results of a kernel on float32 arrays, as float32."""
    from pallas_kernels.fp8 import triton_quantize, triton_quantize_blocks

    # The interpreter knows no assembly.
    triton_quantize.sigmoid = triton_quantize_blocks.sigmoid = triton_quantize.tl.sigmoid
    triton_quantize_blocks.four_bytes = four_bytes
    names = {E4M3: "fp8e4nv", E5M2: "fp8e5", np.float32: "fp32"}
    results = [Array(np.ones(shape, dtype), names[dtype]) for shape, dtype in shapes]
    given = [Array(np.asarray(array, np.float32), "fp32") for array in arrays]
    module = triton_quantize_blocks if isinstance(plan, triton.BlocksPlan) else triton_quantize
    getattr(module, kernel)[(plan.programs,)](*given, *results, plan=plan)
    return [np.asarray(result.array, np.float32) for result in results]


def four_bytes(*parts):
    """What the kernel's assembly computes: bytes of E4M3, rounded with saturation, the first in the lowest byte."""
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    rounded = [np.clip(part.handle.data, -448, 448).astype(E4M3) for part in parts]
    words = np.ascontiguousarray(np.stack(rounded, -1)).view(np.int32)[..., 0]
    return language.tensor(TensorHandle(words, language.int32), language.block_type(language.int32, list(words.shape)))


@needs_triton
@pytest.mark.parametrize("kernels", ["maxima", "blockwise sources tiles blocks"])
def test_the_kernel_rounds_bit_by_bit_as_the_plain_form(kernels):
    done = run_interpreted(__spec__.name, *kernels.split())
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_compiled_for_hopper_it_reads_the_array_once():
    x = jax.ShapeDtypeStruct((512, 384), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((3, 16), jnp.float32)

    def cast(x, state):
        return triton.cast_both(IDENTITY, [x], E5M2, [AmaxHistory(state, 2)])[0]

    with lowering_platform("cuda"):
        blocks = compile_for_hopper(lambda x: triton.quantize_both(IDENTITY, [x], False), x).as_text()
        whole = compile_for_hopper(cast, x, state).as_text()
    for text in (blocks, whole):
        assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1 and " fusion(" not in text


@needs_triton
@pytest.mark.parametrize("shape", [(500, 384), (512, 380)])
def test_other_shapes_are_rounded_by_xla(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with lowering_platform("cuda"):
        blocks = compile_for_hopper(lambda x: triton.quantize_both(IDENTITY, [x], False), x).as_text()
        whole = compile_for_hopper(lambda x: triton.cast_both(IDENTITY, [x], E4M3, [None]), x).as_text()
    assert "triton_kernel_call" not in blocks + whole


@needs_triton
def test_every_operand_of_a_product_with_one_scale_is_rounded_by_one_kernel():
    """Two weights: the input, both weights and both gradients, each rounded and turned; nothing is transposed."""

    def both(x, weights):
        outs, pull = jax.vjp(lambda x, w: fp8_multiply(x, w), x, weights)
        return pull(outs)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 128)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, (w, w), options=step_options()).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 5
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 6 and " transpose(" not in text


@needs_triton
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_wide_arrays_of_an_mlp_are_written_in_fp8_only(recipe):
    """Two results of matmuls, and the gradient of SwiGLU's, are all that is written of [rows, F] in bfloat16."""
    rows = 512
    width = 128
    wide = 384

    def both(x, gate, up, down):
        states = [empty_fp8_state() if recipe == "delayed" else None] * 3
        out, pull = jax.vjp(lambda *a: fp8_swiglu_mlp(*a, recipe=recipe, states=states), x, gate, up, down)
        return pull(out)

    x, first, last = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, width), (width, wide), (wide, width)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, first, first, last, options=step_options()).as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 9
    # Input, three weights, SwiGLU, gradient of the result, gradients of SwiGLU; what the last have with one scale.
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 7 + (3 if recipe == "current" else 0)
    written = re.findall(r"= \(?bf16\[512,384\]\{1,0\}(?:, s8\S+)? ([\w-]+)\(", text[text.index("ENTRY") :])
    assert sorted(set(written)) == ["custom-call", "get-tuple-element"] and written.count("custom-call") == 3


@needs_triton
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_normalised_input_is_written_in_fp8_only(recipe):
    """Delayed: input, weight, gradient, and what comes of the state; current: the input twice."""
    rows = 512
    width = 256

    def both(x, gain, w, state):
        def product(x, gain, w, state):
            y, past = rms_norm(x, gain, epsilon=1e-5, return_input=True)
            states = (state,) if recipe == "delayed" else None
            return fp8_multiply(NormalisedInput(y, past, gain, 1e-5), (w,), recipe=recipe, states=states)[0], past

        out, pull = jax.vjp(product, x, gain, w, state)
        return out[0], pull(out)

    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, width), (width, width)))
    gain, state = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width,), (3, 16)))
    x, w = arrays
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, gain, w, state, options=step_options()).as_text()
    text = text[text.index("ENTRY") :]
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 4
    assert not re.findall(r"= bf16\[512,256\]\S* fusion", text[: text.index("cublas$lt$matmul$f8")])


if __name__ == "__main__":
    let_numpy_index()
    for name in sys.argv[1:]:
        globals()[f"interpret_{name}"](np.random.default_rng(0), (256, 384))
