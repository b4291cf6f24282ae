"""The connection Laplacian does not depend on the frames, and the regression is a Gaussian process."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import load_example

example = load_example("vector_fields")


@pytest.fixture(scope="module")
def surface():
    """A gently curved sheet of 200 points: (points, frames, edges)."""
    random = np.random.default_rng(0)
    x, y = random.uniform(0, 5, (2, 200))
    points = np.stack([x, y, 0.5 * np.sin(x)], -1)
    return points, *example.tangent_frames(points)


def test_frames_are_orthonormal_and_tangent(surface):
    points, frames, edges = surface
    np.testing.assert_allclose(frames.swapaxes(1, 2) @ frames, np.broadcast_to(np.eye(2), (200, 2, 2)), atol=1e-12)
    normal = np.stack([-0.5 * np.cos(points[:, 0]), np.zeros(200), np.ones(200)], -1)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    assert np.max(np.abs(np.einsum("nx,nxd->nd", normal, frames))) < 0.1, "at the edges too"
    assert {(i, j) for i, j in edges} == {(j, i) for i, j in edges}, "edges go both ways"


def test_identity_frames_give_the_laplacian_of_the_graph(surface):
    _, _, edges = surface
    matrix = example.laplacian(np.broadcast_to(np.eye(3), (200, 3, 3)), edges).toarray()
    np.testing.assert_allclose(matrix @ np.tile([1.0, 2.0, 3.0], 200), 0, atol=1e-12)


def test_features_are_orthonormal_fields_of_any_frames(surface):
    _, frames, edges = surface
    values, fields = example.features(frames, edges, 20)
    np.testing.assert_allclose(np.einsum("nxk,nxl->kl", fields, fields) / 200, np.eye(20), atol=1e-4)
    assert np.all(values >= 0) and np.all(np.diff(values) >= -1e-6)
    angles = np.random.default_rng(1).uniform(0, 2 * np.pi, 200)
    cosine = np.cos(angles)
    sine = np.sin(angles)
    turns = np.stack([cosine, -sine, sine, cosine], -1).reshape(200, 2, 2)
    others, turned = example.features(frames @ turns, edges, 20)
    np.testing.assert_allclose(others, values, atol=1e-5)
    weights = (values + 0.1) ** -1.5  # the kernel does not depend on the frames, nor on signs of eigenvectors
    kernels = [np.einsum("nxk,myk,k->nxmy", f[:20], f[:20], weights) for f in (fields, turned)]
    np.testing.assert_allclose(kernels[0], kernels[1], atol=1e-2 * np.max(kernels[0]))


@pytest.mark.longer
def test_bound_is_the_evidence_of_a_dense_gaussian_process_at_its_posterior():
    random = np.random.default_rng(0)
    fields = random.normal(size=(10, 3, 6)).astype(np.float32)
    vectors = random.normal(size=(10, 3)).astype(np.float32)
    model = example.FieldRegression(np.linspace(0.1, 1, 6).astype(np.float32), nnx.Rngs(0))
    weighted = (fields * np.asarray(model.weights())).reshape(30, 6).astype(np.float64)
    noise = float(model.noise())
    covariance = np.linalg.inv(np.eye(6) + weighted.T @ weighted / noise)
    factor = np.linalg.cholesky(covariance)
    model.mean.set_value(jnp.asarray(covariance @ weighted.T @ vectors.ravel() / noise, jnp.float32))
    model.factor.set_value(jnp.asarray(np.tril(factor, -1) + np.diag(np.log(np.diag(factor))), jnp.float32))
    dense = weighted @ weighted.T + noise * np.eye(30)
    solved = np.linalg.solve(dense, vectors.ravel())
    evidence = -0.5 * (vectors.ravel() @ solved + np.linalg.slogdet(dense)[1] + 30 * np.log(2 * np.pi))
    batch = {"features": fields, "vectors": vectors, "count": np.full(10, 10, np.float32)}
    assert float(example.negative_elbo(model, batch)) == pytest.approx(-evidence / 10, rel=1e-4)
    np.testing.assert_allclose(model(fields).ravel(), weighted @ weighted.T @ solved, atol=1e-3)


def test_poincare_index_of_vortex_saddle_and_stream():
    offsets = np.random.default_rng(0).normal(size=(40, 2))
    x, y = offsets.T
    fields = {1: (-y, x), -1: (x, -y), 0: (1 + 0 * x, 0.1 * y), 2: (x**2 - y**2, 2 * x * y)}
    for index, field in fields.items():
        assert example.poincare_index(np.stack(field, -1), offsets) == index


@pytest.mark.trains
def test_training_fits_the_labels(surface):
    _, frames, edges = surface
    known = example.features(frames, edges, 20)
    vectors = known[1] @ np.r_[1.0, -1.0, np.zeros(18)]
    found = example.regress(known, vectors, np.arange(0, 200, 2), 150, seed=0)
    assert example.relative_error(found, vectors) < 0.2
