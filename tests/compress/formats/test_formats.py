"""Methods without calibration: rounding, block floating point, low rank; and the same formats in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.base import AfterTraining, DuringTraining, method_name
from jaxstack.compress.config import METHODS
from jaxstack.compress.formats.block_float import BlockFloat
from jaxstack.compress.formats.integer_grid import QatRule, Rtn
from jaxstack.compress.formats.low_rank import LowRank
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.compress.solvers.lsq import LsqRule
from tests.compilation import run_jitted

W = np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32)


def relative_error(w, packed):
    return float(jnp.sum((packed.matrix() - w) ** 2) / jnp.sum(w**2))


def test_rounding_is_to_the_nearest_of_the_stored_grid():
    packed = Rtn(path=".", bits=4, group_size=16).compress(W, None)
    scales = np.repeat(np.asarray(packed.arrays["scales"], np.float32), 16, axis=1)
    inner = np.abs(np.asarray(W)) <= 7 * scales  # beyond, the largest integer is nearest
    error = np.abs(np.asarray(packed.matrix() - W))
    assert np.all(error[inner] <= scales[inner] / 2 + 1e-6)
    assert packed.arrays["scales"].dtype == jnp.bfloat16 and packed.stored_bytes == 24 * 64 // 2 + 24 * 4 * 2


def test_more_bits_and_smaller_groups_err_less():
    errors = [
        relative_error(W, Rtn(path=".", bits=bits, group_size=size).compress(W, None))
        for bits, size in ((3, None), (3, 16), (4, 16), (8, None))
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4


@pytest.mark.longer
def test_block_floating_point_shares_the_exponent_of_the_largest():
    w = jnp.asarray([[1.0, -0.5, 0.25, 3.0], [0.0, 0.0, 0.0, 0.0]])
    packed = BlockFloat(path=".", bits=4, block_size=4).compress(w, None)
    # 3 is below 2^2, so that integers of 4 bits count in steps of 2^(2 - 3).
    np.testing.assert_array_equal(packed.arrays["q"].astype(jnp.int8), [[2, -1, 0, 6], [0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.matrix()[0], [1.0, -0.5, 0.0, 3.0])
    assert relative_error(W, BlockFloat(path=".", bits=8, block_size=16).compress(W, None)) < 1e-4


def test_low_rank_is_the_nearest_of_its_rank():
    packed = LowRank(path=".", rank=8, dtype="float32").compress(W, None)
    s = np.linalg.svd(np.asarray(W, np.float64), compute_uv=False)
    np.testing.assert_allclose(relative_error(W, packed), (s[8:] ** 2).sum() / (s**2).sum(), rtol=1e-4)
    u = packed.arrays["u"]
    v = packed.arrays["v"]
    np.testing.assert_allclose(jnp.linalg.norm(u, axis=0), jnp.linalg.norm(v, axis=1), rtol=1e-4)
    exact = LowRank(path=".", rank=4, dtype="float32").compress(W[:, :4] @ W[:4], None)
    assert relative_error(W[:, :4] @ W[:4], exact) < 1e-9


def test_a_ratio_chooses_the_rank():
    assert LowRank(path=".", ratio=0.5).rank_of(24, 64) == 8  # 8 x (24 + 64) = 704 of 1536
    assert LowRank(path=".").rank_of(24, 64) == 8


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Rtn(path=".", group_size=48), "group_size 48 does not divide its 64 inputs; the nearest that does is 32"),
        (BlockFloat(path=".", block_size=24), "block_size 24 does not divide its 64 inputs"),
        (LowRank(path=".", rank=20), "rank 20 makes 24 x 64 weights no smaller; take at most 17"),
        (LowRank(path=".", ratio=0.01), "leaves no rank"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused_with_a_way_out(method, reason):
    assert reason in method.unsupported_reason(24, 64)
    assert type(method)(path=".").unsupported_reason(24, 64) is None


def test_a_low_rank_with_rank_and_ratio_is_refused():
    with pytest.raises(ValueError, match="exclude each other"):
        LowRank(path=".", rank=2, ratio=0.5)


BOTH = [
    method(path=".") for method in METHODS if issubclass(method, AfterTraining) and issubclass(method, DuringTraining)
]


@pytest.mark.parametrize("rule", BOTH, ids=method_name)
def test_a_step_computes_with_the_values_that_a_recipe_stores(rule):
    layout = MatrixLayout((2, 64, 128), stack=1, inputs=1)
    w = np.random.default_rng(0).normal(size=layout.shape).astype(np.float32)
    w[1] = 0  # as in the rows that pad a pipeline

    def run(w):
        used = jax.value_and_grad(lambda w: jnp.sum(jnp.square(rule.use(w, layout, None))))(w)
        matrix = layout.to_matrices(w)[0]
        return *used, rule.export(w, layout), rule.compress(matrix, None).matrix(), rule.pack(matrix).matrix()

    used, gradient, exported, compressed, packed = run_jitted(run, w)
    np.testing.assert_array_equal(exported[0].T, compressed)
    np.testing.assert_array_equal(packed, compressed)
    np.testing.assert_allclose(used, np.square(compressed).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * exported, rtol=1e-6)  # straight through the rounding
    assert not np.any(exported[1]) and 0 < np.mean(np.square(exported - w)) < 0.02
    assert rule.after_training == rule


def test_methods_of_one_format_store_the_same():
    assert [method_name(rule) for rule in BOTH] == ["fp8", "bfp", "bct"]
    assert QatRule(path=".", bits=3, group_size=16).format == Rtn(path=".", bits=3, group_size=16).format
    assert QatRule(path=".").after_training.format == QatRule(path=".").format
    assert LsqRule(path=".").after_training.format == LsqRule(path=".").format
