"""Quantization-aware training of one matrix: values of the export's grid, the straight-through gradient, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.formats.integer_grid import IntegerGrid, QatRule, Rtn
from jaxstack.compress.matrix import MatrixLayout, Weight
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.rounding_grid import Grid
from tests.compilation import run_jitted

W = 0.02 * np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "group"),
    [
        (3, 8),
        pytest.param(4, 16, marks=pytest.mark.longer),
        pytest.param(8, None, marks=pytest.mark.longer),
    ],
)
def test_the_export_of_a_trained_weight_is_what_rtn_writes(bits: int, group: int | None):
    rule = QatRule(path=".*", bits=bits, group_size=group)
    packed = Rtn(path=".*", bits=bits, group_size=group).compress(W, None)
    assert np.array_equal(rule.pack(W).matrix(), packed.matrix())
    assert np.array_equal(rule.format.round(W), packed.matrix())
    assert np.array_equal(rule.format.round_in_training(W), packed.matrix())
    scales = rule.grid.scales(W)
    steps = np.asarray(rule.format.round_in_training(W) / jnp.repeat(scales, 32 // scales.shape[1], axis=1))
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert len(np.unique(np.round(steps))) <= 2**bits


def test_the_gradient_is_that_of_the_rounded_weight():
    grid = Grid(3, 8)
    random = np.random.default_rng(1)
    x, y = (random.normal(size=(5, width)).astype(np.float32) for width in (32, 24))

    def loss(w):
        return jnp.sum((x @ w.T - y) ** 2)

    def run(w):
        return jax.grad(lambda w: loss(IntegerGrid(grid).round_in_training(w)))(w), grid.round(w), jax.grad(loss)(w)

    found, rounded, plain = run_jitted(run, W)
    np.testing.assert_allclose(found, 2 * (x @ np.asarray(rounded).T - y).T @ x, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found, plain, rtol=1e-2)


@pytest.mark.longer
def test_stacks_and_several_dims_are_rounded_matrix_by_matrix():
    rule = QatRule(path=".*", bits=4, group_size=8)
    layout = MatrixLayout((2, 16, 3, 4), stack=1, inputs=1)  # two layers [16] -> [3, 4]
    w = jax.random.normal(jax.random.key(3), layout.shape)
    found = rule.export(w, layout)
    for layer in range(2):
        expected = rule.grid.round(w[layer].reshape(16, 12).T).T.reshape(16, 3, 4)
        np.testing.assert_array_equal(found[layer], expected)
    table = MatrixLayout((10, 16), stack=0, inputs=1, outputs_first=True)
    np.testing.assert_array_equal(
        rule.export(w[0, :10].reshape(10, 12)[:, :8], MatrixLayout((10, 8), 0, 1, True)),
        rule.grid.round(w[0, :10].reshape(10, 12)[:, :8]),
    )
    assert table.size == (10, 16)


def test_a_group_that_does_not_divide_the_inputs_is_an_error():
    weight = Weight("a/kernel", ("a/kernel",), MatrixLayout((48, 32), 0, 1))
    with pytest.raises(ConfigError, match="a/kernel: Groups of 32 do not divide a row of 48 weights"):
        QatRule(path=".*", group_size=32).check(weight)
