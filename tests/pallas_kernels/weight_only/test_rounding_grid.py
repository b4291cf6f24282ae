"""Integer grids: closed forms of scales and rounding errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.weight_only.rounding_grid import Grid


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 16), (3, 32)])
def test_rounding_errs_by_at_most_half_a_step(bits, group):
    w = jax.random.normal(jax.random.key(0), (6, 64))
    grid = Grid(bits, group)
    scales = grid.scales(w)
    assert scales.shape == (6, 64 // (group or 64))
    error = np.abs(grid.round(w) - w).reshape(6, scales.shape[1], -1)
    # The largest weight lies half a step above the largest integer, and the scale is rounded by up to 2^-8.
    assert (error <= np.asarray(scales)[..., None] * (0.5 + 2**bits / 2 / 2**8) * (1 + 1e-5)).all()


def test_values_on_the_grid_are_kept():
    q = jnp.array([[-8, 7, 0, 3], [0, 0, 0, 0]], jnp.int8)
    grid = Grid(4, 4)
    scales = jnp.array([[0.25], [1.0]])
    w = grid.dequantize(q, scales)
    np.testing.assert_array_equal(grid.quantize(w, scales), q)
    np.testing.assert_allclose(grid.scales(w), [[8 * 0.25 / 7.5], [1.0]], rtol=2**-8)


def test_what_is_no_grid_is_refused():
    with pytest.raises(ValueError, match="2 to 8 bits"):
        Grid(9)
    with pytest.raises(ValueError, match="divisor of 100"):
        Grid(4, 64).scales(jnp.ones((2, 100)))


@pytest.mark.longer
def test_fitted_scales_err_less_and_keep_values_of_any_such_grid():
    w = jax.random.normal(jax.random.key(0), (2, 6, 32))
    grid = Grid(3, 8)
    scales = grid.fitted_scales(w)
    rounded = jnp.stack([grid.dequantize(grid.quantize(x, s), s) for x, s in zip(w, scales, strict=True)])
    assert jnp.square(rounded - w).mean() < 0.8 * jnp.square(jax.vmap(grid.round)(w) - w).mean()
    again = grid.fitted_scales(rounded)
    kept = jnp.stack([grid.dequantize(grid.quantize(x, s), s) for x, s in zip(rounded, again, strict=True)])
    np.testing.assert_array_equal(kept, rounded)
    np.testing.assert_array_equal(grid.fitted_scales(jnp.zeros((1, 16))), np.ones((1, 2)))
