"""The block-scaled product for Hopper: interpreted against the plain form, and compiled without spills in its loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_multiply, fp8_swiglu_mlp, lowering_platform
from pallas_kernels.fp8 import mosaic
from pallas_kernels.fp8.blockwise import multiply_dequantized, quantize_rows, quantize_weight
from pallas_kernels.fp8.formats import Quantized
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import needs_triton

pytestmark = [
    pytest.mark.longer,  # a few seconds each
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11"),
]


@pytest.mark.parametrize("columns_scaled", [False, True])
@pytest.mark.parametrize(("rows", "width", "columns"), [(256, 640, 256), (128, 128, 384)])
def test_the_kernel_multiplies_as_the_plain_form(monkeypatch, rows, width, columns, columns_scaled):
    """Two programs take several tiles each, in one and in two halves a warpgroup, through a ring that wraps around."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    keys = jax.random.split(jax.random.key(0))
    a = quantize_rows(jax.random.normal(keys[0], (rows, width)) * jnp.arange(1.0, rows + 1)[:, None])
    weight = jax.random.normal(keys[1], (width, columns)) * jnp.arange(1.0, width + 1)[:, None]
    if columns_scaled:
        b = quantize_rows(weight.T)
    else:
        values, inverse_scale = quantize_weight(weight)
        b = Quantized(values.T, inverse_scale)
    _assert_as_plain([(a, b)])
    if not columns_scaled:
        _assert_as_plain([(b, a)])


def test_products_are_summed_in_one_kernel(monkeypatch):
    """Products of different depths, as those of the gradients of q, k and v."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    pairs = []
    for number, width in enumerate((256, 128, 384)):
        keys = jax.random.split(jax.random.key(number))
        values, inverse_scale = quantize_weight(2.0**number * jax.random.normal(keys[1], (width, 128)))
        pairs.append((quantize_rows(jax.random.normal(keys[0], (256, width))), Quantized(values.T, inverse_scale)))
    _assert_as_plain(pairs)


def _assert_as_plain(pairs):
    found = np.asarray(mosaic.product(pairs, jnp.bfloat16), np.float32)
    wanted = np.asarray(multiply_dequantized(pairs, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=2.0**-8, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.exhaustive
@needs_triton
def test_the_wide_arrays_of_an_mlp_are_written_in_fp8_only():
    """Two results of products, and the gradient of SwiGLU's, are all that is written of [rows, F] in bfloat16."""
    rows = 512
    width = 128
    wide = 384

    def both(x, *weights):
        out, pull = jax.vjp(lambda *a: fp8_swiglu_mlp(*a, recipe="blockwise"), x, *weights)
        return pull(out)

    x, first, last = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, width), (width, wide), (wide, width)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, first, first, last).as_text()
    text = text[text.index("ENTRY") :]
    # Three products forward; the gradient of the wide array, one of the input for both weights, those of three weights.
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 8
    # Input, three weights, SwiGLU, gradient of the result, gradients of SwiGLU.
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 7
    written = re.findall(r"= \(?bf16\[512,384\]\{1,0\}\)? ([\w-]+)\(", text)
    assert sorted(set(written)) == ["custom-call"] and len(written) == 3


def test_compiled_for_hopper_it_is_five_tensor_core_kernels(monkeypatch, capfd):
    """Two weights: two products forward, one for the input's gradient, two for the weights'; each is e4m3 by wgmma."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def both(x, weights):
        outs, pull = jax.vjp(lambda x, w: fp8_multiply(x, w, recipe="blockwise"), x, weights)
        return pull(outs)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32768, 2048), (2048, 2048)))
    with lowering_platform("cuda"):
        text = compile_for_hopper(both, x, (w, w)).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 5
    report = "".join(capfd.readouterr())
    spills = re.findall(r"properties for fp8_block_product_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report)
    assert spills and set(spills) == {"0"}
    kernels = report.split(".visible .entry")[1:]
    assert kernels
    for kernel in kernels:
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel and "cp.async.bulk.tensor" in kernel
