"""A Gaussian process of tangent vector fields on a surface that is known only by points.

Neighbouring points are joined in a graph, and a local SVD gives each a frame of its tangent plane. Rotations between
neighbouring frames make the connection Laplacian, whose eigenvectors of low eigenvalues are smooth vector fields. A
Matern kernel weights them, so that regression on these features is a Gaussian process of vector fields.

python docs/examples/fields/vector_fields.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from scipy.sparse.linalg import eigsh
from scipy.spatial import cKDTree

from jaxstack import Trainer
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Cosine
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches

POINTS, NEIGHBOURS, FEATURES, NOISE, BATCH = 1000, 10, 200, 0.05, 32
SMOOTHNESS = 1.5
"""nu of the Matern kernel."""


def swiss_roll(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (points [N, 3], their coordinates along and across the unrolled sheet [N, 2], true frames [N, 3, 2]).

    The roll has two turns, four units apart and 15 high.
    """
    fine, growth = np.linspace(2 * np.pi, 6 * np.pi, 2000), 2 / np.pi
    path = growth * fine * np.array([np.cos(fine), np.sin(fine)])
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(path)))])
    sheet = np.random.default_rng(seed).uniform(0, (along[-1], 15), (POINTS, 2))
    t, zero = np.interp(sheet[:, 0], along, fine), np.zeros(POINTS)
    tangent = np.stack([np.cos(t) - t * np.sin(t), zero, np.sin(t) + t * np.cos(t)], -1)
    tangent /= np.linalg.norm(tangent, axis=-1, keepdims=True)
    points = np.stack([growth * t * np.cos(t), sheet[:, 1], growth * t * np.sin(t)], -1)
    return points, sheet, np.stack([tangent, np.stack([zero, zero + 1, zero], -1)], -1)


def smooth_field(sheet: np.ndarray, seed: int) -> np.ndarray:
    """Return a sum of a few waves over the sheet in the true frames, of mean square 1, [N, 2]."""
    random = np.random.default_rng(seed)
    waves, phases = random.uniform(-0.07, 0.07, (2, 2, 4)), random.uniform(0, 2 * np.pi, (2, 4))
    field = np.sin(np.einsum("ni,ciw->ncw", sheet, waves) + phases).sum(-1)
    return field / np.sqrt(np.mean(np.sum(field**2, -1)))


def vortex(sheet: np.ndarray, centre: np.ndarray, radius: float = 8.0) -> np.ndarray:
    """Return a field that turns around the centre, and fades away from it, [N, 2]."""
    x = (sheet - centre) / radius
    return 2 * np.stack([-x[:, 1], x[:, 0]], -1) / (1 + np.sum(x**2, -1, keepdims=True))


def tangent_frames(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (orthonormal frames of the tangent planes [N, 3, 2], edges [E, 2] to nearest neighbours, both ways)."""
    _, near = cKDTree(points).query(points, NEIGHBOURS + 1)
    offsets = points[near[:, 1:]] - points[:, None]
    axes = np.linalg.svd(offsets)[2]
    # A fitted paraboloid corrects the tilt of one-sided neighbourhoods at the edges of a curved surface.
    x, y, z = np.moveaxis(offsets @ axes.swapaxes(1, 2), -1, 0)
    slopes = (np.linalg.pinv(np.stack([x, y, x * x, x * y, y * y], -1)) @ z[..., None])[:, :2]
    frames = np.linalg.qr((axes[:, :2] + slopes * axes[:, 2:]).swapaxes(1, 2))[0]
    joined = scipy.sparse.lil_matrix((len(points), len(points)), dtype=bool)
    joined[np.repeat(np.arange(len(points)), NEIGHBOURS), near[:, 1:].ravel()] = True
    return frames, np.argwhere((joined + joined.T).toarray())


def laplacian(frames: np.ndarray, edges: np.ndarray) -> scipy.sparse.csc_matrix:
    """Return the connection Laplacian over the mean degree, [N D, N D], for frames [N, 3, D].

    Its blocks are -O, the orthogonal matrix closest to the product of two frames, and the degree on the diagonal. For
    frames that all are the identity it is the Laplacian of the graph, once per component.
    """
    (i, j), (count, _, width) = edges.T, frames.shape
    left, _, right = np.linalg.svd(frames[i].swapaxes(1, 2) @ frames[j])
    shape = (width * count, width * count)
    lines = (width * i[:, None, None] + np.arange(width)[:, None] + np.zeros((1, width), int)).ravel()
    columns = (width * j[:, None, None] + np.arange(width) + np.zeros((width, 1), int)).ravel()
    joined = scipy.sparse.csc_matrix((-(left @ right).ravel(), (lines, columns)), shape)
    degrees = np.repeat(np.bincount(i, minlength=count).astype(float), width)
    return (joined + scipy.sparse.diags(degrees)).tocsc() / (len(edges) / count)


def features(frames: np.ndarray, edges: np.ndarray, count: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    """Return (the lowest eigenvalues [K], the smooth fields in space [N, 3, K], of mean square 1)."""
    matrix = laplacian(frames, edges)
    start = np.random.default_rng(0).normal(size=matrix.shape[0])
    values, vectors = eigsh(matrix, count, sigma=-1e-3, which="LM", v0=start)
    fields = np.einsum("nxd,ndk->nxk", frames, vectors.reshape(len(frames), -1, count))
    return np.maximum(values, 0).astype(np.float32), (fields * len(frames) ** 0.5).astype(np.float32)


class FieldRegression(nnx.Module):
    """Bayesian regression on features, with a Gaussian posterior of the whitened weights and learned scales."""

    def __init__(self, eigenvalues: np.ndarray, rngs: nnx.Rngs):
        self.eigenvalues = nnx.Variable(jnp.asarray(eigenvalues))
        self.mean = nnx.Param(jnp.zeros(len(eigenvalues)))
        self.factor = nnx.Param(jnp.zeros((len(eigenvalues), len(eigenvalues))))
        self.log_bend = nnx.Param(jnp.log(jnp.asarray(eigenvalues[len(eigenvalues) // 8])))
        self.log_size, self.log_noise = nnx.Param(jnp.zeros(())), nnx.Param(jnp.log(jnp.float32(0.2)))

    def weights(self) -> jax.Array:
        """Return the roots of the spectral density (lambda + 2 nu / kappa^2)^-nu, scaled to mean square 1, [K]."""
        log_density = -SMOOTHNESS * jnp.log(self.eigenvalues[...] + jnp.exp(self.log_bend[...]))
        return jnp.exp(self.log_size[...] + 0.5 * (log_density - jax.nn.logsumexp(log_density)))

    def posterior(self) -> tuple[jax.Array, jax.Array]:
        """Return mean [K] and lower factor [K, K] of the covariance of the whitened weights."""
        factor = jnp.tril(self.factor[...], -1) + jnp.diag(jnp.exp(jnp.diag(self.factor[...])))
        return self.mean[...], factor

    def noise(self) -> jax.Array:
        """Return the variance of the noise, with a floor."""
        return jnp.exp(2 * self.log_noise[...]) + 1e-4

    def __call__(self, features: jax.Array) -> jax.Array:
        """Features [B, 3, K] -> mean vectors [B, 3]."""
        return features @ (self.weights() * self.posterior()[0])


def negative_elbo(model: Any, batch: Any) -> jax.Array:
    """Mean over the rows of -E[log likelihood] + KL / number of labels."""
    mean, factor = model.posterior()
    weighted = batch["features"] * model.weights()
    squares = (batch["vectors"] - weighted @ mean) ** 2 + jnp.sum((weighted @ factor) ** 2, -1)
    noise = model.noise()
    expected = 0.5 * jnp.sum(squares / noise + jnp.log(2 * jnp.pi * noise), -1)
    divergence = 0.5 * (jnp.sum(factor**2) + jnp.sum(mean**2) - len(mean)) - jnp.sum(jnp.diag(model.factor[...]))
    return jnp.mean(expected + divergence / batch["count"])


def regress(known: Any, vectors: np.ndarray, labels: np.ndarray, steps: int, seed: int) -> np.ndarray:
    """Return the mean vectors at all points [N, 3] after training on noisy vectors at the labels."""
    eigenvalues, fields = known
    random = np.random.default_rng(seed)
    noisy = vectors[labels] + NOISE * random.normal(size=(len(labels), 3))
    rows = {"features": fields[labels], "vectors": noisy.astype(np.float32)}
    rows["count"] = np.full(len(labels), len(labels), np.float32)
    trainer = Trainer(
        lambda rngs: FieldRegression(eigenvalues, rngs), negative_elbo, numpy_batches(rows, BATCH, seed),
        optimizer=AdamW(learning_rate=3e-2, weight_decay=0.0), schedule=Cosine(final_fraction=0.01),
        train=TrainConfig(steps=steps, global_batch_size=BATCH), seed=seed,
    )  # fmt: skip
    trainer.fit()
    return np.asarray(trainer.trained_module(jnp.asarray(fields)))


def radial_regression(points: np.ndarray, vectors: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Return the mean of a Gaussian process with an RBF kernel in space, in closed form, [N, 3].

    The length of the kernel is that of the highest marginal likelihood on a grid.
    """
    noisy = vectors[labels] + NOISE * np.random.default_rng(seed).normal(size=(len(labels), 3))
    squares = np.sum((points[:, None] - points[labels]) ** 2, -1)
    found = []
    for length in np.geomspace(0.5, 30, 25):
        kernel = np.mean(noisy**2) * np.exp(-0.5 * squares / length**2)
        covariance = kernel[labels] + NOISE**2 * np.eye(len(labels))
        solved = np.linalg.solve(covariance, noisy)
        likelihood = -0.5 * np.sum(noisy * solved) - 1.5 * np.linalg.slogdet(covariance)[1]
        found.append((likelihood, kernel @ solved))
    return max(found, key=lambda pair: pair[0])[1]


def poincare_index(field: np.ndarray, offsets: np.ndarray) -> int:
    """Return how often vectors [n, 2] turn around while their offsets [n, 2] from a centre do once."""
    order = np.argsort(np.arctan2(offsets[:, 1], offsets[:, 0]))
    angles = np.arctan2(field[order, 1], field[order, 0])
    turns = np.diff(np.append(angles, angles[0]))
    return round(float(np.sum((turns + np.pi) % (2 * np.pi) - np.pi)) / (2 * np.pi))


def relative_error(found: np.ndarray, vectors: np.ndarray) -> float:
    """Return the L2 norm of the error over that of the vectors."""
    return float(np.linalg.norm(found - vectors) / np.linalg.norm(vectors))


def main(steps: int = 1500, seed: int = 0, shares: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)) -> dict[str, Any]:
    """Compare three Gaussian processes at several shares of labels, and fill a hole around a vortex."""
    points, sheet, true_frames = swiss_roll(seed)
    frames, edges = tangent_frames(points)
    vector = features(frames, edges)
    scalar = features(np.broadcast_to(np.eye(3), (POINTS, 3, 3)), edges, FEATURES * 3 // 2)
    random = np.random.default_rng(seed + 1)
    vectors = np.einsum("nxd,nd->nx", true_frames, smooth_field(sheet, seed))
    order, curves = random.permutation(POINTS), {"vector fields": [], "scalar Laplacian": [], "RBF": []}
    for share in shares:
        labels = order[: round(share * POINTS)]
        found = (
            regress(vector, vectors, labels, steps, seed),
            regress(scalar, vectors, labels, steps, seed),
            radial_regression(points, vectors, labels, seed),
        )
        for curve, field in zip(curves.values(), found, strict=True):
            curve.append((100 * share, relative_error(field, vectors)))
    ours, laplacian_error, radial_error = (dict(curve)[5.0] for curve in curves.values())

    centre = np.array([sheet[:, 0].max() / 2, 7.5])
    offsets = sheet - centre
    distance = np.linalg.norm(offsets, axis=-1)
    turning = np.einsum("nxd,nd->nx", true_frames, vortex(sheet, centre))
    outside = random.permutation(np.flatnonzero(distance > 6))[:300]
    filled = np.einsum("nxd,nx->nd", true_frames, regress(vector, turning, outside, steps, seed))
    ring = (distance > 1.5) & (distance < 4)
    index = poincare_index(filled[ring], offsets[ring])
    return {
        "claim": "Gaussian processes of vector fields on a manifold fill in sparse fields and keep singularities.",
        "paper": "arXiv:2309.16746",
        "measure": "relative L2 error from labels at 5 % of the points of a swiss roll; baseline: scalar Laplacian",
        "ours": ours, "baseline": laplacian_error, "published": None,
        "checks": {
            "error at least 1.5 times below the scalar Laplacian": ours <= laplacian_error / 1.5,
            "error at least 1.5 times below an RBF kernel in space": ours <= radial_error / 1.5,
            "the vortex in a hole keeps its Poincare index": index == 1,
        },
        "numbers": {
            "error of the RBF kernel": radial_error, "Poincare index in the hole": float(index),
            "error in the hole": relative_error(filled[distance < 6], vortex(sheet, centre)[distance < 6]),
        },
        "picture": [{"title": "Relative error", "x_label": "% of the points with labels", "curves": curves}],
    }  # fmt: skip


if __name__ == "__main__":
    for name, value in main().items():
        if name != "picture":
            print(f"{name}: {value}")
