"""Products of 8-bit integers: exact against an integer reference, equal in training and inference, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Grid, int8_dot_general, packed_matmul
from pallas_kernels.weight_only.integer_products import MOST_INPUTS, recover_integers, unsupported_inputs
from pallas_kernels.weight_only.packed import pack_nearest

TOKENS = 5
IN = 48
OUT = 6
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(TOKENS, IN)).astype(np.float32) * np.float32([[1], [30], [1e-3], [0], [1e20]])
W = RANDOM.normal(size=(OUT, IN)).astype(np.float32) * np.float32([[1], [1e-4], [1], [0], [1e4], [0.02]])
W[2] = 127.5 * np.sign(W[2]) * (np.arange(IN) % 3)  # its scale is a power of two
DIMS = (((1,), (0,)), ((), ()))


def reference(x, w, dtype):
    """The product by NumPy: integers of inputs and weights, summed in int64, times both scales in float32."""
    x = np.asarray(x, dtype).astype(np.float32)
    grid = Grid(8)
    scales = np.abs(x).max(1, keepdims=True) * np.float32(1 / 127)
    scales = np.where(scales > 0, scales, np.float32(1))
    q = np.rint(x / scales).astype(np.int64)
    assert np.abs(q).max() == 127
    w_scales = np.asarray(grid.scales(w))
    sums = q @ np.asarray(grid.quantize(w, w_scales), np.int64).T
    return (sums.astype(np.float32) * scales * w_scales[:, 0]).astype(dtype)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.longer)])
def test_training_and_inference_are_the_integer_reference(dtype):
    expected = reference(X, W, dtype)
    rounded = jax.jit(Grid(8).round)(W)
    trained = jax.jit(lambda x, w: int8_dot_general(x, w, DIMS))(X.astype(dtype), rounded.T)
    served = jax.jit(packed_matmul)(X.astype(dtype), pack_nearest(Grid(8), W, round_inputs=True))
    assert trained.dtype == served.dtype == dtype
    np.testing.assert_array_equal(trained, expected)
    np.testing.assert_array_equal(served, expected)


@pytest.mark.longer
def test_integers_of_rounded_weights_are_recovered():
    """Every scale of bfloat16, with the largest integer 127 or -128: also where one is 127/128 of another."""
    mantissas = np.arange(128, 256, dtype=np.float32)
    rows = [[127, -127, 3], [-128, 127, 3], [127, 0, 0], [-128, -5, 0], [-127, 64, 1]]
    rows.append([0, 0, 0])
    q = np.repeat(np.asarray(rows, np.int8), len(mantissas), axis=0)
    scales = np.tile(mantissas, len(rows))[:, None] * np.float32(2.0**-12)
    w = q.astype(np.float32) * scales
    found, found_scales = jax.jit(recover_integers)(w.T)
    np.testing.assert_array_equal(found, q.T)
    np.testing.assert_array_equal(found_scales, np.where(q.any(1, keepdims=True), scales, 1).T)


@pytest.mark.longer
def test_the_gradient_is_that_of_the_rounded_operands():
    """Closed form: the gradient of x is d_y Ŵ, that of the weights X̂' d_y, as if nothing had been rounded."""
    x = RANDOM.normal(size=(TOKENS, IN)).astype(np.float32)
    w = Grid(8).round(W[:3])
    d_y = RANDOM.normal(size=(TOKENS, 3)).astype(np.float32)

    @jax.jit
    def gradients(x, w, packed, d_y):
        y, pull = jax.vjp(lambda x, w: int8_dot_general(x, w, DIMS), x, w)
        return y, *pull(d_y), jax.vjp(lambda x: packed_matmul(x, packed), x)[1](d_y)[0]

    packed = pack_nearest(Grid(8), W[:3], round_inputs=True)
    y, d_x, d_w, packed_d_x = gradients(x, w.T, packed, d_y)
    scales = np.abs(x).max(1, keepdims=True) / 127
    rounded = np.rint(x / scales) * scales
    np.testing.assert_allclose(y, rounded @ w.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(d_x, d_y @ w, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(d_w, rounded.T @ d_y, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(packed_d_x, d_x, rtol=1e-4, atol=1e-3)


@pytest.mark.longer
def test_several_dims_are_one_token():
    x = jnp.asarray(X[:2].reshape(2, 4, 12))
    w = Grid(8).round(W).T.reshape(4, 12, 2, 3)
    found = jax.jit(lambda x, w: int8_dot_general(x, w, (((1, 2), (0, 1)), ((), ()))))(x, w)
    np.testing.assert_array_equal(found.reshape(2, OUT), reference(X[:2], W, np.float32))
    packed = pack_nearest(Grid(8), W, round_inputs=True).with_dims((4, 12), (2, 3))
    np.testing.assert_array_equal(jax.jit(packed_matmul)(x, packed), found)


def test_what_is_not_supported_is_refused():
    with pytest.raises(ValueError, match="contract x's last dims"):
        int8_dot_general(X, W, (((1,), (1,)), ((), ())))
    with pytest.raises(ValueError, match="weights in float32"):
        int8_dot_general(X, W.T.astype(jnp.bfloat16), DIMS)
    with pytest.raises(ValueError, match="need weights with bits 8 and group_size null"):
        pack_nearest(Grid(4, 8), W, round_inputs=True)
    assert unsupported_inputs(MOST_INPUTS) is None and "overflow" in str(unsupported_inputs(MOST_INPUTS + 1))
    assert MOST_INPUTS * 127 * 128 < 2**31 <= (MOST_INPUTS + 1) * 127 * 128
