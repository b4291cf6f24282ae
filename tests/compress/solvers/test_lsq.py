"""Training with learned scales: the start on GPTQ's grid, the gradient, the export, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.compress.matrix import MatrixLayout, Weight
from jaxstack.compress.solvers.gptq import gptq
from jaxstack.compress.solvers.lsq import LsqRule, round_with_scales
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.rounding_grid import Grid
from tests.compilation import run_jitted

W = 0.02 * np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)
RULE = LsqRule(path=".*", bits=3, group_size=8)


@pytest.mark.longer
def test_scales_start_on_the_grid_of_gptq_and_have_the_gradient_of_lsq():
    solved = gptq(jnp.asarray(W), jnp.eye(32) + 0.3, RULE.grid, 0.01)
    start = RULE.grid.dequantize(solved.q, solved.scales)
    layout = MatrixLayout((32, 24), 0, 1)
    stored = RULE.store(layout.from_matrices(start), layout)
    np.testing.assert_array_equal(RULE.use(stored, layout, None), start.T)
    w = jnp.asarray([[0.1, 0.26, -0.74, 2.0]])
    scales = jnp.asarray([[0.25]])
    of_w, of_scales = jax.grad(lambda w, s: round_with_scales(w, s, Grid(3)).sum(), (0, 1))(w, scales)
    np.testing.assert_array_equal(of_w, [[1, 1, 1, 0]])  # 2.0 is clipped to 3 steps
    np.testing.assert_allclose(of_scales, [[(0 - 0.4) + (1 - 1.04) + (-3 + 2.96) + 3]], atol=1e-5)
    halved = RULE.keep(stored, {**stored, "scale": stored["scale"] - 1})
    np.testing.assert_array_equal(halved["scale"], stored["scale"] / 2)


def test_the_export_is_what_rtn_with_fitted_scales_writes():
    layout = MatrixLayout((32, 24), 0, 1)
    rtn = Rtn(path=".*", bits=3, group_size=8, scales="fitted")

    def run(w):
        stored = RULE.store(w.T, layout)
        stored = {"weight": 1.1 * stored["weight"], "scale": 0.93 * stored["scale"]}
        trained = RULE.master(stored, layout)
        exports = rtn.compress(layout.to_matrices(trained), None).matrix(), RULE.pack(stored).matrix()
        return trained, exports, RULE.kept(stored, layout), rtn.compress(w, None).matrix(), RULE.format.round(w)

    trained, exports, kept, compressed, rounded = run_jitted(run, W)
    for export in exports:
        np.testing.assert_array_equal(export.T, trained)
    assert kept == W.size
    np.testing.assert_array_equal(compressed, rounded)


def test_integer_products_need_scales_of_the_largest_weights():
    with pytest.raises(ValueError, match="need `scales: largest`"):
        Rtn(path=".", bits=8, group_size=None, activations="int8", scales="fitted")


def test_a_group_that_does_not_divide_the_inputs_is_an_error():
    weight = Weight("a/kernel", ("a/kernel",), MatrixLayout((48, 32), 0, 1))
    with pytest.raises(ConfigError, match="a/kernel: Groups of 32 do not divide a row of 48 weights"):
        LsqRule(path=".*", group_size=32).check(weight)
