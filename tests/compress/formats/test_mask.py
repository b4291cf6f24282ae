"""Zeros that stay zero: in the gradient, and through steps of an optimizer that moves every weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.formats.sparse import MaskRule
from jaxstack.compress.matrix import MatrixLayout

LAYOUT = MatrixLayout((8, 6), stack=0, inputs=1)


@pytest.mark.longer
def test_zeros_get_no_gradient_and_stay_through_any_step():
    rule = MaskRule(path=".*")
    w = jax.random.normal(jax.random.key(0), LAYOUT.shape)
    w = jnp.where(jax.random.uniform(jax.random.key(1), w.shape) < 0.5, 0.0, w)
    x = jax.random.normal(jax.random.key(2), w.shape)
    gradient = jax.grad(lambda w: jnp.sum(rule.use(w, LAYOUT, None) * x))(w)
    np.testing.assert_array_equal(gradient, jnp.where(w == 0, 0, x))
    stepped = rule.keep(w, w + 1.0)
    np.testing.assert_array_equal(stepped == 0, w == 0)
    np.testing.assert_array_equal(stepped[w != 0], (w + 1.0)[w != 0])
    assert int(rule.kept(w, LAYOUT)) == int((w != 0).sum())
    np.testing.assert_array_equal(rule.export(w, LAYOUT), w)
