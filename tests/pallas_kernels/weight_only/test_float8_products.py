"""Products with FP8 weights: inputs of many rows rounded to e4m3, those of few rows as they are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import PackedWeight, packed_matmul
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS, quantize_tokens, round_tokens
from pallas_kernels.weight_only.formats import Float8Format, RoundedInputFloat8Format
from pallas_kernels.weight_only.packed import pack_float8, stack_packed

OUT = 48
IN = 64
RANDOM = np.random.default_rng(0)
Q = RANDOM.normal(size=(OUT, IN), scale=64).astype(ml_dtypes.float8_e4m3fn)
SCALES = RANDOM.uniform(0.01, 0.02, (OUT, 1)).astype(ml_dtypes.bfloat16)
DENSE = Q.astype(np.float64) * SCALES.astype(np.float64)


def inputs(rows: int) -> np.ndarray:
    """Tokens of different sizes."""
    return (RANDOM.normal(size=(rows, IN)) * 10.0 ** RANDOM.uniform(-3, 3, (rows, 1))).astype(np.float32)


def weight(round_inputs: bool = True) -> PackedWeight:
    return pack_float8(jnp.asarray(Q), jnp.asarray(SCALES), round_inputs=round_inputs)


def rounded(x: np.ndarray) -> np.ndarray:
    """Tokens rounded by NumPy, in float64."""
    scales = np.abs(x).max(1, keepdims=True) * np.float32(1 / 448)
    scales[scales == 0] = 1
    return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales


def test_tokens_are_rounded_to_the_nearest_numbers_with_their_own_scale():
    x = inputs(100)
    x[3] = 0
    q, scales = quantize_tokens(jnp.asarray(x))
    assert q.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(q, np.float32)).max(1) == np.where(np.arange(100) == 3, 0, 448))
    error = np.abs(np.asarray(round_tokens(jnp.asarray(x))) - x)
    # Half of the distance of neighbours: 2^-4 of a normal number; below 2^-6 they are 2^-9 apart.
    assert np.all(error <= np.maximum(np.abs(x) / 16, np.asarray(scales) * 2.0**-10) * 1.0001)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, MOST_EXACT_ROWS, MOST_EXACT_ROWS + 1, 200])
def test_only_products_of_many_rows_round_their_inputs(rows, dtype):
    x = jnp.asarray(inputs(rows), dtype)
    wide = np.asarray(x, np.float32)
    found = np.asarray(jax.jit(packed_matmul)(x, weight()), np.float64)
    exact = wide @ DENSE.T
    expected = rounded(wide) @ DENSE.T if rows > MOST_EXACT_ROWS else exact
    size = np.abs(wide).max(1, keepdims=True) * np.abs(DENSE).max() * IN**0.5
    assert np.abs((found - expected) / size).max() < (1e-6 if dtype == jnp.float32 else 0.01)
    unrounded = np.asarray(jax.jit(packed_matmul)(x, weight(round_inputs=False)), np.float64)
    assert np.abs((unrounded - exact) / size).max() < (1e-6 if dtype == jnp.float32 else 0.01)
    if rows > MOST_EXACT_ROWS:
        relative = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert 0.005 < np.median(relative) < 0.05, "e4m3 has 3 bits after the leading one"


def test_gradients_pass_the_rounding():
    x = jnp.asarray(inputs(MOST_EXACT_ROWS + 6))

    def total(x, scales):
        return packed_matmul(x, pack_float8(jnp.asarray(Q), scales, round_inputs=True)).sum()

    d_x, d_scales = jax.grad(total, (0, 1))(x, jnp.asarray(SCALES, jnp.float32))
    np.testing.assert_allclose(d_x, np.broadcast_to(DENSE.sum(0), d_x.shape), rtol=1e-5, atol=1e-5)
    expected = (rounded(np.asarray(x)) @ Q.astype(np.float64).T).sum(0)[:, None]
    np.testing.assert_allclose(d_scales, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


def test_inputs_of_a_stack_are_not_rounded():
    stack = stack_packed([weight(), weight()])
    assert stack is not None and stack.format == Float8Format() and stack.shape == (2, IN, OUT)


def test_blocks_are_refused():
    with pytest.raises(ValueError, match="a scale for each output, not for blocks"):
        RoundedInputFloat8Format(128, 128)
