"""RMSNorm, rotary embedding and SwiGLU against their formulas, with gradients, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import apply_rotary, rms_norm, swiglu
from tests.compilation import run_jitted


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def plain_rms_norm(x, weight, offset=0.0):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (weight + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    x = normal(3, 5, 16)
    weight = normal(16, seed=1)
    np.testing.assert_allclose(
        rms_norm(x, weight, weight_offset=offset), plain_rms_norm(x, weight, offset), rtol=1e-5, atol=1e-6
    )
    gradient = jax.grad(lambda x, w: (rms_norm(x, w, weight_offset=offset) ** 3).sum(), argnums=(0, 1))
    expected = jax.grad(lambda x, w: (plain_rms_norm(x, w, offset) ** 3).sum(), argnums=(0, 1))
    for ours, plain in zip(run_jitted(gradient, x, weight), run_jitted(expected, x, weight), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-3)
    unscaled = jax.grad(lambda x: (rms_norm(x) ** 3).sum())
    expected = jax.grad(lambda x: (plain_rms_norm(x, 1.0) ** 3).sum())
    np.testing.assert_allclose(run_jitted(unscaled, x), run_jitted(expected, x), rtol=1e-3, atol=1e-3)


def test_rms_norm_in_low_precision_is_rounded_once():
    x = normal(4, 64, dtype=jnp.bfloat16)
    weight = normal(64, seed=1)
    out = rms_norm(x, weight)
    exact = plain_rms_norm(x.astype(jnp.float32), weight)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=2**-8)


def test_rms_norm_adds_the_residual():
    x = normal(2, 8)
    residual = normal(2, 8, seed=2)
    weight = normal(8, seed=1)
    out, total = rms_norm(x, weight, residual=residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(out, rms_norm(x + residual, weight))


def test_rms_norm_keeps_its_input_only():
    x = normal(4, 64, dtype=jnp.bfloat16)
    _, pullback = jax.vjp(lambda x: rms_norm(x, normal(64)), x)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    assert kept <= x.size * 2 + 64 * 4 + 4 * 4


def test_rotary_rotates_by_the_position():
    """Scores of rotated vectors depend on the distance of the positions only."""
    frequencies = 1.0 / 100.0 ** (jnp.arange(4) / 4)
    angles = jnp.arange(12)[:, None] * frequencies
    q = jnp.tile(normal(1, 1, 2, 10), (1, 12, 1, 1))
    k = jnp.tile(normal(1, 1, 2, 10, seed=1), (1, 12, 1, 1))
    q, k = (apply_rotary(x, jnp.cos(angles), jnp.sin(angles)) for x in (q, k))
    scores = jnp.einsum("btnh,bsnh->nts", q, k)
    np.testing.assert_allclose(scores[:, 5, 3], scores[:, 9, 7], rtol=1e-4)
    np.testing.assert_allclose(q[0, :, :, 8:], jnp.broadcast_to(q[0, :1, :, 8:], (12, 2, 2)))
    first = q[0, 3, 0, 0]
    second = q[0, 3, 0, 4]
    cos = jnp.cos(angles[3, 0])
    sin = jnp.sin(angles[3, 0])
    before = normal(1, 1, 2, 10)[0, 0, 0]
    np.testing.assert_allclose(
        [first, second], [before[0] * cos - before[4] * sin, before[4] * cos + before[0] * sin], rtol=1e-5
    )


@pytest.mark.longer
def test_rotary_positions_of_each_sequence():
    x = normal(2, 6, 1, 8)
    angles = normal(2, 6, 4, seed=1)
    together = apply_rotary(x, jnp.cos(angles), jnp.sin(angles))
    alone = apply_rotary(x[1:], jnp.cos(angles[1]), jnp.sin(angles[1]))
    np.testing.assert_allclose(together[1:], alone, rtol=1e-6)


def test_swiglu():
    gate = normal(3, 8)
    up = normal(3, 8, seed=1)
    np.testing.assert_allclose(swiglu(gate, up), jax.nn.silu(gate) * up, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda g, u: (swiglu(g, u) ** 2).sum(), argnums=(0, 1))
    expected = jax.grad(lambda g, u: ((jax.nn.silu(g) * u) ** 2).sum(), argnums=(0, 1))
    for ours, plain in zip(run_jitted(gradient, gate, up), run_jitted(expected, gate, up), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_shapes_name_the_rule():
    with pytest.raises(ValueError, match=r"weight must have shape \[8\].*got \[7\]"):
        rms_norm(jnp.zeros((2, 8)), jnp.zeros(7))
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        rms_norm(jnp.zeros((2, 8)), residual=jnp.zeros((1, 8)))
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(ValueError, match="length T of x"):
        apply_rotary(jnp.zeros((1, 5, 1, 8)), jnp.zeros((4, 4)), jnp.zeros((4, 4)))
