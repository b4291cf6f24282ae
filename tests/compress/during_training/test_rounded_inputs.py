"""Training with inputs rounded to int8 (W8A8): the bits of the packed model, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.compress.formats.integer_grid import QatRule
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, in_fp8
from jaxstack.precision import PrecisionConfig
from pallas_kernels import PackedWeight, packed_matmul

W8A8: dict[str, Any] = {"bits": 8, "group_size": None, "activations": "int8"}
MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, vocab_size=64)


class Dense(nnx.Module):
    """A dense layer of Flax."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(24, 6, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


@pytest.mark.quick
def test_a_training_step_computes_what_the_packed_layer_does():
    module = compress_in_training(Dense, [QatRule(path="kernel", **W8A8)])
    params, other = module.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 24))
    packed = module.view(Compression).pack(params)["layer/kernel"]

    @jax.jit
    def run(params, packed):
        used = module.used.merge(module.use(params, None)[0], other)
        exported = module.merge(params, other)
        return used(x), exported(x), packed_matmul(x, packed)

    trained, evaluated, served = run(params, packed)
    np.testing.assert_array_equal(trained, served)
    np.testing.assert_array_equal(evaluated, served)
    assert np.any(served != x @ packed.matrix().T)


@pytest.mark.longer
def test_gradients_pass_the_rounding_of_inputs_and_weights():
    """The gradient of a sum of squares y² is 2 X̂' y for the weights and 2 y Ŵ' for the inputs, with rounded X̂ and Ŵ."""
    rule = QatRule(path="kernel", **W8A8)
    module = compress_in_training(Dense, [rule])
    params, other = module.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 24))

    @jax.jit
    @jax.grad
    def gradient(params_and_x):
        params, x = params_and_x
        return jnp.sum(jnp.square(module.used.merge(module.use(params, None)[0], other)(x)))

    d_params, d_x = gradient((params, x))
    rounded_w = np.asarray(rule.grid.round(params["layer"]["kernel"].T)).T
    scales = np.abs(x).max(1, keepdims=True) / 127
    rounded_x = np.rint(x / scales) * scales
    y = rounded_x @ rounded_w
    np.testing.assert_allclose(d_params["layer"]["kernel"], 2 * rounded_x.T @ y, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(d_x, 2 * y @ rounded_w.T, rtol=1e-3, atol=1e-4)


def test_the_decoder_of_a_trained_model_gets_packed_weights():
    module = compress_in_training(lambda rngs: Transformer(MODEL, rngs), [QatRule(path="^decoder/", **W8A8)])
    compression = module.view(Compression)
    packed = nnx.eval_shape(lambda: compression.pack_rounding(module.init(jax.random.key(0))[0]))
    assert len(packed) == 2 * 7
    weight = packed["decoder/layers/1/attention/o_proj/kernel"]
    assert isinstance(weight, PackedWeight) and (weight.inputs, weight.outputs) == ((2, 8), (16,))
    assert weight.format.name == "integer_w8a8"


def test_what_does_not_fit_is_one_message():
    for wrong in ({"bits": 4}, {"group_size": 8}):
        with pytest.raises(ConfigError, match="need weights with bits 8 and group_size null"):
            QatRule(path=".", **{**W8A8, **wrong})
    rule = QatRule(path=".", **W8A8)
    with pytest.raises(ConfigError, match=r"activations int8 matches embedding/table, which is no dense layer"):
        compress_in_training(lambda rngs: Transformer(MODEL, rngs), [rule])
    fp8 = PrecisionConfig(fp8="current")
    with pytest.raises(ConfigError, match="kernel has another matmul already, such as that of precision.fp8"):
        compress_in_training(
            lambda rngs: in_fp8(Transformer(MODEL, rngs), fp8), [QatRule(path="decoder/.*/mlp", **W8A8)]
        )
