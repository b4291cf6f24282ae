"""MXFP4 and NF4: rounding to their values, beside references, and files of gpt-oss that hold what was compressed."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy.special import ndtri

from jaxstack.compress.base import AfterTraining, stack_compressed
from jaxstack.compress.formats.fp4 import NF4_VALUES, Mxfp4, Nf4, fp4_codes
from jaxstack.models.huggingface.quantized_weights import store_mxfp4, unsupported_reason
from pallas_kernels import PackedWeight, packed_matmul
from pallas_kernels.weight_only.formats import FP4_VALUES
from tests.compilation import run_jitted

RANDOM = np.random.default_rng(0)
W = (RANDOM.normal(size=(48, 128)) * np.exp(RANDOM.normal(size=(48, 1)))).astype(np.float32)


def pack(w: np.ndarray, method: AfterTraining) -> PackedWeight:
    found = method.compress(jnp.asarray(w), None)
    assert isinstance(found, PackedWeight)
    return found


def pack_experts(w: np.ndarray, method: AfterTraining) -> PackedWeight:
    found = stack_compressed([pack(one, method) for one in w])
    assert isinstance(found, PackedWeight)
    return found


def test_numbers_are_rounded_to_the_nearest_fp4_ties_to_even():
    middles = (FP4_VALUES[1:8] + FP4_VALUES[:7]) / 2
    x = np.concatenate([RANDOM.uniform(-6.9, 6.9, 4000), FP4_VALUES, middles, -middles]).astype(np.float32)
    expected = x.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(FP4_VALUES[fp4_codes(jnp.asarray(x))], expected)


def ocp(w: np.ndarray) -> np.ndarray:
    """Section 6.3 of the MX specification: a scale of 2^(floor(log2(largest)) - 2), values rounded and saturated."""
    blocks = w.reshape(len(w), -1, 32).astype(np.float64)
    scales = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2)
    values = (blocks / scales).clip(-6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (values * scales).reshape(w.shape).astype(np.float32)


@pytest.mark.longer
def test_mxfp4_is_that_of_the_specification_and_fitted_scales_err_less():
    packed = pack(W, Mxfp4(path="."))
    np.testing.assert_array_equal(packed.matrix(), ocp(W))
    assert packed.stored_bytes == W.size // 2 + W.size // 32 + 64
    errors = [
        float(np.sum((pack(W, Mxfp4(path=".", scales=scales)).matrix() - W) ** 2)) for scales in ("largest", "fitted")
    ]
    assert errors[1] < 0.95 * errors[0]
    edge = np.stack([np.zeros(32), np.full(32, 2.0**-126), np.linspace(-7.9, 7.9, 32)]).astype(np.float32)
    found = np.asarray(pack(edge, Mxfp4(path=".")).matrix())
    assert not found[0].any() and np.isfinite(found).all() and np.abs(found[2]).max() == 6


def test_the_table_of_nf4_has_quantiles_of_the_normal_distribution():
    """As bitsandbytes makes it: 8 positive and 7 negative quantiles between 1 - 0.9677083 and 0.5, and a zero."""
    offset = 0.9677083
    positive = ndtri(np.linspace(offset, 0.5, 9)[:-1])
    negative = -ndtri(np.linspace(offset, 0.5, 8)[:-1])
    table = np.sort(np.concatenate([negative, [0.0], positive]))
    np.testing.assert_allclose(NF4_VALUES, table / np.abs(table).max(), atol=1e-6)


def test_nf4_takes_the_nearest_value_of_each_block():
    x = RANDOM.normal(size=(3, 128)).astype(np.float32)

    def run(w, x):
        packed = Nf4(path=".").compress(w, None)
        return packed, packed.matrix(), packed_matmul(x, packed), Nf4(path=".").compress(0 * w, None).matrix()

    packed, matrix, product, of_zeros = run_jitted(run, W, x)
    blocks = W.reshape(48, -1, 64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    distances = np.abs((blocks / largest)[..., None] - NF4_VALUES)
    expected = (NF4_VALUES[distances.argmin(-1)] * largest).reshape(W.shape)
    np.testing.assert_array_equal(matrix, expected)
    assert packed.stored_bytes == W.size // 2 + W.size // 64 * 4 + 64
    np.testing.assert_allclose(product, x @ expected.T, rtol=1e-4, atol=1e-4)
    assert not np.any(of_zeros)


@pytest.mark.longer
def test_experts_in_mxfp4_are_files_of_gpt_oss():
    """Blocks and scales in the order of the released files, decoded here as transformers decodes them."""
    experts = RANDOM.normal(size=(3, 16, 64)).astype(np.float32)
    packed = pack_experts(experts, Mxfp4(path="."))
    assert unsupported_reason(packed, "mxfp4") is None
    assert "not in MXFP4" in str(unsupported_reason(pack_experts(experts, Nf4(path=".")), "mxfp4"))
    files = store_mxfp4([packed])
    blocks, scales = files["_blocks"], files["_scales"]
    assert blocks.shape == (3, 16, 2, 16) and scales.shape == (3, 16, 2) and blocks.dtype == scales.dtype == np.uint8
    values = np.stack([FP4_VALUES[blocks & 15], FP4_VALUES[blocks >> 4]], -1).reshape(3, 16, 2, 32)
    decoded = np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(3, 16, 64)
    np.testing.assert_array_equal(decoded, np.stack([ocp(w) for w in experts]))


@pytest.mark.parametrize(("method", "inputs"), [(Mxfp4, 48), (Nf4, 96)])
def test_rows_that_are_no_whole_blocks_are_refused(method, inputs):
    reason = method(path=".").unsupported_reason(16, inputs)
    assert reason is not None and f"does not divide its {inputs} inputs" in reason
