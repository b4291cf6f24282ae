"""Products on the sphere equal Gaunt coefficients in closed form and the Fourier route, and turn with their inputs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.spatial.transform import Rotation

from benchmarks.training.fields import load_example

example = load_example("gaunt_products")


def wigner_3j(j1, j2, j3, m1, m2, m3):
    """Racah's formula."""
    if m1 + m2 + m3 or not abs(j1 - j2) <= j3 <= j1 + j2 or abs(m1) > j1 or abs(m2) > j2 or abs(m3) > j3:
        return 0.0
    f = math.factorial
    triangle = f(j1 + j2 - j3) * f(j1 - j2 + j3) * f(-j1 + j2 + j3) / f(j1 + j2 + j3 + 1)
    orders = f(j1 + m1) * f(j1 - m1) * f(j2 + m2) * f(j2 - m2) * f(j3 + m3) * f(j3 - m3)
    total = 0.0
    for k in range(max(0, j2 - j3 - m1, j1 - j3 + m2), min(j1 + j2 - j3, j1 - m1, j2 + m2) + 1):
        below = f(k) * f(j1 + j2 - j3 - k) * f(j1 - m1 - k) * f(j2 + m2 - k)
        total += (-1) ** k / (below * f(j3 - j2 + m1 + k) * f(j3 - j1 - m2 + k))
    return (-1) ** (j1 - j2 - m3) * math.sqrt(triangle * orders) * total


def real_from_complex(degree):
    """[(L + 1)^2, (L + 1)^2]: real harmonics as sums of complex ones, in packed order."""
    rows, columns = example.packed(degree)
    orders = columns - degree
    place = {(n, m): i for i, (n, m) in enumerate(zip(rows, orders, strict=True))}
    matrix = np.zeros((len(rows), len(rows)), complex)
    for (n, m), i in place.items():
        sign = (-1) ** abs(m)
        if m == 0:
            matrix[i, i] = 1
        elif m > 0:
            matrix[i, place[n, m]], matrix[i, place[n, -m]] = sign / 2**0.5, 1 / 2**0.5
        else:
            matrix[i, place[n, -m]], matrix[i, place[n, m]] = sign / (1j * 2**0.5), -1 / (1j * 2**0.5)
    return matrix, [(int(n), int(m)) for n, m in zip(rows, orders, strict=True)]


def test_coefficients_equal_those_of_wigner_symbols():
    change, names = real_from_complex(2)
    closed = np.zeros((9, 9, 9), complex)
    for a, (i, mi) in enumerate(names):
        for b, (j, mj) in enumerate(names):
            for c, (k, mk) in enumerate(names):
                size = math.sqrt((2 * i + 1) * (2 * j + 1) * (2 * k + 1) / (4 * math.pi))
                closed[a, b, c] = size * wigner_3j(i, j, k, 0, 0, 0) * wigner_3j(i, j, k, mi, mj, mk)
    real = np.einsum("ai,bj,ck,ijk->abc", change, change, change, closed)
    assert np.max(np.abs(real.imag)) < 1e-12
    np.testing.assert_allclose(example.gaunt_tensor(2), real.real, atol=1e-6)


@pytest.mark.longer
@pytest.mark.parametrize("degree", [0, 1, 4])
def test_product_on_the_grid_equals_the_contraction(degree):
    assert example.contraction_error(degree) < 1e-5


def test_product_equals_the_route_over_a_fourier_series():
    degree = 3
    points = 16
    place = (slice(None), *example.packed(degree))
    x = np.zeros((2, degree + 1, 2 * degree + 1), np.float32)
    x[place] = np.random.default_rng(0).normal(size=(2, 16))
    angle = 2 * np.pi * np.arange(points) / points
    # A function on the sphere, continued over the poles, is periodic in both angles.
    table = example.legendre(degree, np.cos(angle))
    table *= np.sign(np.sin(angle) + 1e-9) ** np.abs(np.arange(-degree, degree + 1))[:, None]
    torus = np.einsum("flm,lmt,mp->ftp", x, table, example.fourier(degree, angle))
    series = np.fft.fft2(np.fft.ifft2(np.fft.fft2(torus)).prod(0)) / points**2  # a convolution of both series
    k = np.fft.fftfreq(points, 1 / points)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    longitudes = 2 * np.pi * np.arange(11) / 11
    latitude = np.exp(1j * np.outer(k, np.arccos(nodes)))
    longitude = np.exp(1j * np.outer(k, longitudes))
    values = np.einsum("uv,ut,vp->tp", series, latitude, longitude).real
    down = example.legendre(degree, nodes) * weights * 2 * np.pi / 11
    expected = np.einsum("tp,mp,lmt->lm", values, example.fourier(degree, longitudes), down)
    np.testing.assert_allclose(example.Sphere(degree).product(*x), expected, atol=1e-5)


def test_harmonics_of_vectors_equal_those_of_angles():
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    longitude = np.arctan2(vectors[:, 1], vectors[:, 0])
    expected = np.einsum("lmn,mn->nlm", example.legendre(4, vectors[:, 2]), example.fourier(4, longitude))
    np.testing.assert_allclose(example.harmonics(4, jnp.asarray(vectors, jnp.float32)), expected, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.trains
def test_forces_turn_with_the_cluster_and_mirrors_have_one_energy():
    model = example.Potential(1, nnx.Rngs(0))
    positions = np.random.default_rng(0).uniform(-1.8, 1.8, (1, 8, 3)).astype(np.float32)
    turn = Rotation.random(random_state=0).as_matrix().astype(np.float32)
    before, after = np.split(example.forces(model, np.concatenate([positions, positions @ turn.T])), 2)
    np.testing.assert_allclose(after, before @ turn.T, atol=2e-4 * float(np.max(np.abs(before))))
    # Products with an odd sum of degrees are zero, so that nothing tells an arrangement from its mirror image.
    np.testing.assert_allclose(model(positions * np.float32([-1, 1, 1])), model(positions), rtol=1e-4)


@pytest.mark.exhaustive
def test_a_few_steps_lower_the_error_of_the_forces():
    rows = example.clusters(16, seed=0)
    before = float(example.force_error(example.Potential(1, nnx.Rngs(0)), rows))
    assert float(example.force_error(example.train(1, rows, 10, seed=0), rows)) < before
