"""The column sweep against closed forms, a slow float64 elimination, and the errors of the other methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compression.synthetic_layer import SyntheticLayer, make_layer
from jaxstack.compress.formats.sparse import Pattern
from jaxstack.compress.solvers.awq import candidate_scales, round_scaled, rounding_errors
from jaxstack.compress.solvers.column_sweep import factorize, sweep
from jaxstack.compress.solvers.gptq import Round, Rounded, gptq
from jaxstack.compress.solvers.sparsegpt import sparsegpt
from jaxstack.compress.solvers.wanda import wanda
from pallas_kernels import lowering_platform
from pallas_kernels.weight_only.rounding_grid import Grid
from tests.compilation import run_jitted

PRUNING = {
    "50%": (Pattern(), {"magnitude": 0.071, "wanda": 0.017, "sparsegpt": 0.013}),
    "2:4": (Pattern(keep_of=(2, 4)), {"magnitude": 0.137, "wanda": 0.062, "sparsegpt": 0.042}),
}
"""Relative output errors of a NumPy prototype at the same layer."""
ROUNDING = {4: {"rtn": 0.0129, "awq": 0.0096, "gptq": 0.0072}, 3: {"rtn": 0.056, "awq": 0.044, "gptq": 0.031}}
"""The same for integers of 4 and 3 bits in groups of 128."""


@pytest.fixture(scope="module")
def layer() -> SyntheticLayer:
    return make_layer()


def _float32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


@pytest.mark.longer
def test_as_many_columns_an_iteration_as_on_a_gpu_give_the_same_values(layer: SyntheticLayer):
    w = _float32(layer.w)[:, :134]  # a block and six columns, of which two are left over
    scales = jnp.broadcast_to(Grid(4).scales(w), w.shape)
    upper = factorize(_float32(layer.hessian)[:134, :134]).upper
    one = sweep(w, upper, Round(Grid(4)), scales)
    with lowering_platform("cuda"):
        several = sweep(w, upper, Round(Grid(4)), scales)
    np.testing.assert_array_equal(one, several)
    assert (one != w).mean() > 0.9


def _values(grid: Grid, rounded: Rounded) -> jax.Array:
    return grid.dequantize(rounded.q, rounded.scales.astype(jnp.float32))


@pytest.mark.longer
@pytest.mark.parametrize("name", list(PRUNING))
def test_pruning_errors(layer: SyntheticLayer, name: str):
    pattern, expected = PRUNING[name]
    w = _float32(layer.w)
    hessian = _float32(layer.hessian)
    found = {
        "magnitude": pattern.prune(w, jnp.abs(w)),
        "wanda": wanda(w, _float32(np.square(layer.x).sum(0)), pattern),
        "sparsegpt": sparsegpt(w, hessian, pattern).w,
    }
    for method, pruned in found.items():
        assert float((pruned == 0).mean()) == 0.5
        assert layer.error(pruned) == pytest.approx(expected[method], rel=0.04), method


@pytest.mark.longer
@pytest.mark.parametrize("bits", list(ROUNDING))
def test_rounding_errors(layer: SyntheticLayer, bits: int):
    w = _float32(layer.w)
    hessian = _float32(layer.hessian)
    grid = Grid(bits, 128)
    rounded = gptq(w, hessian, grid)
    candidates = candidate_scales(_float32(np.abs(layer.x).mean(0)), [w], 128)
    best = candidates[jnp.argmin(rounding_errors(w, candidates, hessian, grid))]
    found = {
        "rtn": grid.round(w),
        "awq": round_scaled(w, best, grid),
        "gptq": _values(grid, rounded),
    }
    assert bool(rounded.valid)
    again = grid.quantize(found["gptq"], rounded.scales.astype(jnp.float32))
    np.testing.assert_array_equal(again, rounded.q)  # the dense weights hold the integers exactly
    for method, new in found.items():
        assert layer.error(new) == pytest.approx(ROUNDING[bits][method], rel=0.04), method


def _eliminate(w: np.ndarray, hessian: np.ndarray, choose) -> np.ndarray:
    """Optimal brain surgeon in float64, with the inverse Hessian of the columns that are left written out.

    Args:
      choose: (w, diagonal of the inverse, i) -> new column i.
    """
    w = w.copy()
    inverse = np.linalg.inv(hessian)
    for i in range(w.shape[1]):
        new = choose(w, np.diag(inverse), i)
        w[:, i + 1 :] -= np.outer((w[:, i] - new) / inverse[i, i], inverse[i, i + 1 :])
        w[:, i] = new
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return w


def _damped(hessian: np.ndarray) -> np.ndarray:
    return hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))


@pytest.mark.parametrize(
    ("inputs", "rows", "group"), [(16, 64, 8), pytest.param(200, 1024, 50, marks=pytest.mark.longer)]
)
def test_gptq_equals_elimination_in_float64(inputs: int, rows: int, group: int):
    layer = make_layer(inputs, rows)
    grid = Grid(4, group)
    order = np.argsort(-np.diag(layer.hessian))
    found = gptq(_float32(layer.w), _float32(layer.hessian), grid)
    scales = np.asarray(found.scales, np.float64)
    spread = np.repeat(scales, group, 1)[:, order]

    def rounded(w: np.ndarray, diagonal: np.ndarray, i: int) -> np.ndarray:
        return np.clip(np.round(w[:, i] / spread[:, i]), -8, 7) * spread[:, i]

    expected = np.empty_like(layer.w)
    expected[:, order] = _eliminate(layer.w[:, order], _damped(layer.hessian)[np.ix_(order, order)], rounded)
    same = np.asarray(found.q) == np.round(expected / np.repeat(scales, group, 1))
    assert same.mean() > 0.99
    assert layer.error(_values(grid, found)) == pytest.approx(layer.error(expected), rel=0.01)


@pytest.mark.longer
def test_sparsegpt_equals_elimination_in_float64():
    layer = make_layer(72, 512)
    zero = np.zeros(layer.w.shape, bool)

    def pruned(w: np.ndarray, diagonal: np.ndarray, i: int) -> np.ndarray:
        if i % 4 == 0:
            # U_jj^2 is the diagonal of the inverse of the Hessian of the columns from j on.
            rest = [np.linalg.inv(_damped(layer.hessian)[j:, j:])[0, 0] for j in range(i, i + 4)]
            scores = np.square(w[:, i : i + 4]) / np.array(rest)
            np.put_along_axis(zero[:, i : i + 4], np.argsort(scores, 1)[:, :2], True, 1)
        return np.where(zero[:, i], 0, w[:, i])

    expected = _eliminate(layer.w, _damped(layer.hessian), pruned)
    found = sparsegpt(_float32(layer.w), _float32(layer.hessian), Pattern(keep_of=(2, 4))).w
    assert (np.asarray(found == 0) == zero).mean() > 0.99
    assert layer.error(found) == pytest.approx(layer.error(expected), rel=0.01)


def test_one_pruned_column_moves_into_the_other():
    hessian = np.array([[2.0, 1.2], [1.2, 3.0]])
    w = np.array([[0.1, 1.0], [-0.2, 2.0]])
    found = sparsegpt(_float32(w), _float32(hessian), Pattern(keep_of=(1, 2)), damping=0.0)
    expected = w[:, 1] + w[:, 0] * hessian[0, 1] / hessian[1, 1]  # least squares without the first input
    np.testing.assert_allclose(found.w, np.stack([np.zeros(2), expected], 1), rtol=1e-6)


@pytest.mark.longer
def test_factor_of_the_inverse():
    hessian = make_layer(24, 64).hessian
    factor = factorize(_float32(hessian), damping=0.0)
    upper = np.asarray(factor.upper)
    assert bool(factor.valid) and not np.tril(upper, -1).any()
    np.testing.assert_allclose(upper.T @ upper @ hessian, np.eye(24), atol=2e-4)


def test_failed_factorization_leaves_plain_rounding():
    w = _float32(make_layer(16, 64).w)
    grid = Grid(4, 8)
    hessian = np.eye(16)
    hessian[[0, 1], [1, 0]] = 5
    found = gptq(w, _float32(hessian), grid)
    assert not bool(found.valid)
    scales, q = run_jitted(lambda w: (grid.scales(w), grid.quantize(w, found.scales.astype(jnp.float32))), w)
    np.testing.assert_array_equal(found.q, q)
    np.testing.assert_array_equal(found.scales, scales.astype(jnp.bfloat16))


@pytest.mark.longer
def test_dead_inputs_get_zero_weights():
    layer = make_layer(32, 128)
    hessian = layer.hessian.copy()
    hessian[5], hessian[:, 5] = 0.0, 0.0
    grid = Grid(8, 16)
    found = gptq(_float32(layer.w), _float32(hessian), grid)
    assert bool(found.valid) and not found.q[:, 5].any()


def test_no_group_of_a_pattern_is_cut_by_a_block():
    x = np.random.default_rng(0).normal(size=(400, 132))
    hessian = _float32(2 / len(x) * x.T @ x)
    w = jax.random.normal(jax.random.key(0), (4, 132))
    found = sparsegpt(w, hessian, Pattern(keep_of=(2, 6))).w  # 6 does not divide blocks of 128 columns
    np.testing.assert_array_equal((np.asarray(found) == 0).reshape(4, -1, 6).sum(-1), 4)


def test_n_of_m_keeps_n_in_every_group():
    random = np.random.default_rng(0)
    scores = random.integers(0, 3, (16, 24)).astype(np.float32)  # with many equal scores
    shapes = ((2, 4), (1, 3), (7, 8))
    found = run_jitted(lambda scores: [Pattern(keep_of=shape).zeros(scores) for shape in shapes], scores)
    for (kept, size), pruned in zip(shapes, found, strict=True):
        zeros = np.asarray(pruned).reshape(16, -1, size)
        assert (zeros.sum(-1) == size - kept).all()
        groups = scores.reshape(16, -1, size)
        assert (np.where(zeros, groups, -1).max(-1) <= np.where(zeros, 9, groups).min(-1)).all()
    with pytest.raises(ValueError, match="multiple of 5 inputs; this layer has 24"):
        Pattern(keep_of=(2, 5)).zeros(jnp.asarray(scores))
