"""Zeros that stay zero: in the gradient, and through steps of an optimizer that moves every weight."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.compress.formats.sparse import MaskRule
from jaxstack.compress.matrix import MatrixLayout
from tests.compilation import run_jitted

LAYOUT = MatrixLayout((8, 6), stack=0, inputs=1)


def test_zeros_get_no_gradient_and_stay_through_any_step():
    rule = MaskRule(path=".*")
    random = np.random.default_rng(0)
    w, x = random.normal(size=(2, *LAYOUT.shape)).astype(np.float32)
    w[random.random(w.shape) < 0.5] = 0

    def run(w):
        gradient = jax.grad(lambda w: jnp.sum(rule.use(w, LAYOUT, None) * x))(w)
        return gradient, rule.keep(w, w + 1.0), rule.kept(w, LAYOUT), rule.export(w, LAYOUT)

    gradient, stepped, kept, exported = run_jitted(run, w)
    np.testing.assert_array_equal(gradient, np.where(w == 0, 0, x))
    np.testing.assert_array_equal(stepped, np.where(w == 0, 0, w + 1))
    assert kept == np.count_nonzero(w)
    np.testing.assert_array_equal(exported, w)
