"""8-bit AdamW: the dynamic code, blocks, and the distance to AdamW in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.optim.base import RunInfo
from jaxstack.optim.optimizers import AdamW8bit
from jaxstack.optim.optimizers.adamw_8bit import dequantize, dynamic_code, quantize


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_the_published_one(signed):
    """Values of bitsandbytes' `create_dynamic_map`, 256 of them, from its description."""
    code = dynamic_code(signed)
    assert len(set(code.tolist())) == 256 and code[-1] == 1 and 0 in code
    assert code[-2] == pytest.approx(0.99296875 if signed else 0.996484375)
    assert np.min(code[code > 0]) == pytest.approx(5.5e-7 if signed else 3.25e-7)
    per_decade = [np.count_nonzero((code > 10.0 ** (d - 7)) & (code < 10.0 ** (d - 6))) for d in range(7)]
    assert per_decade == [2 ** (d if signed else d + 1) for d in range(7)]
    if signed:
        np.testing.assert_array_equal(np.sort(-code[code < 0]), code[(code > 0) & (code < 1)])
        assert np.count_nonzero(code < 0) == 127


@pytest.mark.parametrize("shape, scales", [
    ((4, 512), (4, 2)), ((3, 300), (3, 2)),
    pytest.param((2, 8, 64), (2, 2, 1), marks=pytest.mark.longer),
    pytest.param((2, 3, 4, 128), (2, 3, 2, 1), marks=pytest.mark.longer),
])  # fmt: skip
def test_values_are_rounded_to_the_nearest_of_their_block(shape, scales):
    x = normal(*shape)
    codes, found = quantize(jnp.asarray(x), True)
    assert codes.dtype == np.uint8 and codes.shape == shape and found.shape == scales
    back = np.asarray(dequantize(codes, found, True))
    if shape == (4, 512):
        code = dynamic_code(True).astype(np.float64)
        for i in range(4):
            for block in (slice(0, 256), slice(256, 512)):
                scale = np.abs(x[i, block]).max()
                nearest = code[np.abs(x[i, block][:, None] / scale - code).argmin(1)] * scale
                np.testing.assert_allclose(back[i, block], nearest, rtol=1e-5, atol=1e-7)
    assert np.abs(back - x).max() < 0.04 * np.abs(x).max()
    np.testing.assert_array_equal(quantize(jnp.zeros(shape), True)[1], 0)


def test_small_matrices_embeddings_and_vectors_are_not_quantized():
    settings = AdamW8bit()

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    assert settings.updates_as_matrix("layers/0/mlp/up_proj/kernel", shape(3, 64, 64))
    assert not settings.updates_as_matrix("layers/0/mlp/up_proj/kernel", shape(3, 63, 64)), "4032 values a layer"
    assert settings.updates_as_matrix("layers/0/attention/q_proj/kernel", shape(64, 2, 32))
    assert not any(
        settings.updates_as_matrix(path, shape(512, 64)) for path in ("embedding/table", "head", "norm/scale")
    )


@pytest.mark.longer
def test_steps_stay_close_to_those_in_float32_at_a_quarter_of_the_state():
    params = {"kernel": jnp.asarray(normal(64, 256))}
    core = AdamW8bit().core(RunInfo())
    adam = optax.scale_by_adam(0.9, 0.95)
    state = core.init(params)
    other = adam.init(params)

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim)

    assert size(state) == 2 * 64 * 256 + 2 * 64 * 4 and size(other) == 8 * 64 * 256
    for step in range(20):
        gradient = {"kernel": jnp.asarray(normal(64, 256, seed=step))}
        found, state = core.update(gradient, state, params)
        wanted, other = adam.update(gradient, other, params)
    error = jnp.linalg.norm(found["kernel"] - wanted["kernel"]) / jnp.linalg.norm(wanted["kernel"])
    assert 1e-4 < float(error) < 0.05
