"""The example `fpga`: rounding and its gradient, and circuits whose results equal JAX's bit for bit."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import check_result, load_example

example = load_example("fpga")
INPUTS = np.random.default_rng(0).integers(-32, 32, (200, 16))


def random_model(seed: int) -> nnx.Module:
    """An integer network with large weights, so that sums reach both bounds of the hidden format."""
    model = example.IntegerMLP(nnx.Rngs(seed))
    for layer in model.layers:
        layer.bias[...] = jax.random.normal(jax.random.key(seed), layer.bias.shape)
        layer.kernel[...] = 2 * layer.kernel[...]
    return model


def jax_scores(model: nnx.Module) -> np.ndarray:
    return np.asarray(model.scores(jnp.asarray(INPUTS / 2**example.FRACTION, jnp.float32)), int)


def test_rounding_is_exact_and_its_gradient_that_of_clipping():
    x = jnp.linspace(-12, 12, 1001)
    rounded = np.asarray(example.to_grid(x, -8, 7))
    np.testing.assert_array_equal(rounded, np.clip(np.floor(np.asarray(x) + 0.5), -8, 7))
    slope = jax.grad(lambda x: example.to_grid(x, -8, 7).sum())(x)
    np.testing.assert_array_equal(slope, (x > -8) & (x < 7))


@pytest.mark.longer
def test_evaluated_circuit_equals_jax():
    model = random_model(0)
    for (kernel, bias), bits in zip(model.constants(), example.WEIGHT_BITS, strict=True):
        assert (kernel == jnp.round(kernel)).all() and (bias == jnp.round(bias)).all()
        assert kernel.min() >= -(2 ** (bits - 1)) and kernel.max() < 2 ** (bits - 1)
    circuit, _ = example.to_verilog(model)
    np.testing.assert_array_equal(example.evaluate(circuit, INPUTS), jax_scores(model))


@pytest.mark.longer
def test_evaluation_notices_wires_of_too_few_bits():
    model = random_model(0)
    circuit, width = example.to_verilog(model)
    narrow = re.sub(rf"\[{width - 1}:0\] y_", "[7:0] y_", circuit)
    assert (example.evaluate(narrow, INPUTS) != jax_scores(model)).any()


@pytest.mark.longer
def test_simulated_circuit_equals_jax():
    if not shutil.which("iverilog"):
        pytest.skip("no iverilog installed")
    model = random_model(2)
    np.testing.assert_array_equal(example.simulate(*example.to_verilog(model), INPUTS), jax_scores(model))


@pytest.mark.longer
def test_registers_follow_every_layer():
    circuit, _ = example.to_verilog(random_model(0))
    stages = [re.findall(rf"reg signed \[\d+:0\] {name}_\d+;", circuit) for name in ("a1", "a2", "y")]
    assert [len(stage) for stage in stages] == [32, 16, 5]


@pytest.mark.trains
def test_integer_network_trains():
    model = example.train_model(example.IntegerMLP, steps=30, seed=0)
    assert example.accuracy(model, example.clusters(1000, seed=1)) > 0.4  # 0.2 is chance


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 3])
def test_acceptance(seed):
    found = example.main(seed=seed)
    check_result(found)
    assert all(found["checks"].values()), found["checks"]
