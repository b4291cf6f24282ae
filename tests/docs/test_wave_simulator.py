"""The solver conserves energy, and one-way filters are square filters of low rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import load_example

example = load_example("wave_simulator")


def test_solver_conserves_the_discrete_energy():
    found = example.simulate(3, seed=0).astype(np.float64)
    fields = found[:, :-1]
    squared_courant = found[:, -1:]

    def gradients(u):
        padded = np.pad(u, ((0, 0), (0, 0), (1, 1), (1, 1)))
        return np.diff(padded, axis=2)[..., 1:-1], np.diff(padded, axis=3)[:, :, 1:-1]

    kinetic = np.sum(np.diff(fields, axis=1) ** 2 / squared_courant, (2, 3))
    potential = sum(np.sum(g[:, 1:] * g[:, :-1], (2, 3)) for g in gradients(fields))
    energy = kinetic + potential
    np.testing.assert_allclose(energy, np.broadcast_to(energy[:, :1], energy.shape), rtol=1e-4)


@pytest.mark.longer
def test_one_way_filters_equal_their_square_form():
    layer = example.OneWayConv(3, 8, nnx.Rngs(0))
    layer.bias.set_value(jnp.arange(8.0))
    x = jax.random.normal(jax.random.key(1), (2, 9, 7, 3))
    np.testing.assert_allclose(layer(x), layer.in_passes(x), atol=2e-5)
    filters = np.asarray(layer.square_filters())
    assert np.linalg.matrix_rank(filters[:, :, 0, 0], tol=1e-4) == example.RANK
    assert np.max(np.abs(layer(x)[0, 0] - layer(x)[1, 0])) > 0.1, "the outputs depend on the inputs"


def test_rows_hold_neighbouring_times_of_one_run():
    rows = example.make_rows(2, seed=3)
    found = example.simulate(2, seed=3)
    now, before, speed = np.moveaxis(rows["fields"], -1, 0)
    time = next(t for t in range(found.shape[1]) if np.array_equal(found[0, t], now[0]))
    np.testing.assert_array_equal(before[0], found[0, time - 1])
    np.testing.assert_array_equal(rows["target"][0], found[0, time + example.AHEAD])
    np.testing.assert_array_equal(speed[0], found[0, -1])


@pytest.mark.trains
def test_one_way_network_trains_and_is_small():
    rows = example.make_rows(8, seed=0)
    model, count = example.train(example.OneWayConv, rows, 3, 1e-2, seed=0)
    assert count == 2181 and count * 5 < sum(
        x.size for x in jax.tree.leaves(nnx.state(example.Simulator(example.square_conv, nnx.Rngs(0)), nnx.Param))
    )
    assert np.all(np.isfinite(model(jnp.asarray(rows["fields"][:2]))))
