"""Quantization-aware training of one matrix: values of the export's grid, the straight-through gradient, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.column_sweep import gptq
from jaxstack.compress.methods.rtn import Rtn
from jaxstack.compressed_training.compressible_weights import MatrixLayout, Weight
from jaxstack.compressed_training.qat import QatRule, round_straight_through, round_with_scales
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.rounding_grid import Grid

W = 0.02 * np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 16), (3, 8)])
def test_the_export_of_a_trained_weight_is_what_rtn_writes(bits: int, group: int | None):
    rule = QatRule(path=".*", bits=bits, group_size=group)
    packed = Rtn(path=".*", bits=bits, group_size=group).compress(W, None)
    assert np.array_equal(rule.pack(W).matrix(), packed.matrix())
    assert np.array_equal(rule.compress(W, train=False), packed.matrix())
    assert np.array_equal(rule.compress(W, train=True), packed.matrix())
    scales = rule.grid.scales(W)
    steps = np.asarray(rule.compress(W, train=True) / jnp.repeat(scales, 32 // scales.shape[1], axis=1))
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert len(np.unique(np.round(steps))) <= 2**bits


def test_the_gradient_is_that_of_the_rounded_weight():
    grid, x, y = (
        Grid(3, 8),
        jax.random.normal(jax.random.key(1), (5, 32)),
        jax.random.normal(jax.random.key(2), (5, 24)),
    )
    loss = lambda w: jnp.sum((x @ w.T - y) ** 2)  # noqa: E731
    found = jax.grad(lambda w: loss(round_straight_through(w, grid)))(W)
    rounded = grid.round(W)
    np.testing.assert_allclose(found, 2 * (x @ rounded.T - y).T @ x, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found, jax.grad(loss)(W), rtol=1e-2)


LEARNED = QatRule(path=".*", bits=3, group_size=8, scales="learned")


def test_learned_scales_start_on_the_grid_of_gptq_and_have_the_gradient_of_lsq():
    solved = gptq(jnp.asarray(W), jnp.eye(32) + 0.3, LEARNED.grid, 0.01)
    start = LEARNED.grid.dequantize(solved.q, solved.scales)
    layout = MatrixLayout((32, 24), 0, 1)
    stored = LEARNED.store(layout.from_matrices(start), layout)
    np.testing.assert_array_equal(LEARNED.use(stored, layout, None), start.T)
    w, scales = jnp.asarray([[0.1, 0.26, -0.74, 2.0]]), jnp.asarray([[0.25]])
    of_w, of_scales = jax.grad(lambda w, s: round_with_scales(w, s, Grid(3)).sum(), (0, 1))(w, scales)
    np.testing.assert_array_equal(of_w, [[1, 1, 1, 0]])  # 2.0 is clipped to 3 steps
    np.testing.assert_allclose(of_scales, [[(0 - 0.4) + (1 - 1.04) + (-3 + 2.96) + 3]], atol=1e-5)
    halved = LEARNED.keep(stored, {**stored, "scale": stored["scale"] - 1})
    np.testing.assert_array_equal(halved["scale"], stored["scale"] / 2)


def test_the_export_of_learned_scales_is_what_rtn_with_fitted_scales_writes():
    layout = MatrixLayout((32, 24), 0, 1)
    stored = LEARNED.store(jnp.asarray(W.T), layout)
    stored = {"weight": 1.1 * stored["weight"], "scale": 0.93 * stored["scale"]}
    trained = LEARNED.master(stored, layout)
    packed = Rtn(path=".*", bits=3, group_size=8, scales="fitted").compress(layout.to_matrices(trained), None)
    np.testing.assert_array_equal(packed.matrix().T, trained)
    np.testing.assert_array_equal(LEARNED.pack(stored).matrix().T, trained)
    assert LEARNED.kept(stored, layout) == W.size
    np.testing.assert_array_equal(Rtn(path=".*", bits=3, group_size=8, scales="fitted").compress(W, None).matrix(),
                                  LEARNED.compress(W, train=False))  # fmt: skip


def test_integer_products_need_scales_of_the_largest_weights():
    w8a8: Any = {"path": ".", "bits": 8, "group_size": None, "activations": "int8"}
    for make in (lambda: QatRule(**w8a8, scales="learned"), lambda: Rtn(**w8a8, scales="fitted")):
        with pytest.raises(ValueError, match="need `scales: largest`"):
            make()


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
