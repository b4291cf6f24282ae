"""Products of features that turn with an atom's neighbourhood, in O(L^3) operations; learns energies and forces.

Coefficients of spherical harmonics up to degree L are a function on the sphere. The product of two such functions, with
its coefficients up to degree L again, is the Gaunt tensor product. Instead of contracting with its O(L^6) coefficients,
evaluate both functions on a grid, multiply, and integrate: exact on Gauss-Legendre latitudes and equal longitudes.

python docs/examples/fields/gaunt_products.py
"""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.spatial.transform import Rotation
from scipy.special import lpmv

from jaxstack import Trainer
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Cosine
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches

ATOMS, CUTOFF, CHANNELS, BATCH = 8, 3.0, 8, 32


def legendre(degree: int, x: np.ndarray) -> np.ndarray:
    """Return the latitude factors of real spherical harmonics, [L + 1, 2L + 1, points]; 0 for orders above degrees."""
    table = np.zeros((degree + 1, 2 * degree + 1, len(x)))
    for n, m in zip(*packed(degree), strict=True):
        order = abs(m - degree)
        table[n, m] = norm(n, order) * (-1) ** order * lpmv(order, n, x)
    return table


def norm(n: int, m: int) -> float:
    """Return the factor that makes the integral of a squared spherical harmonic 1."""
    return math.sqrt((2 * n + 1) / (4 * math.pi) * math.factorial(n - m) / math.factorial(n + m))


def fourier(degree: int, angles: np.ndarray) -> np.ndarray:
    """Return the longitude factors, [2 degree + 1 orders, angles]: sines for negative orders, cosines for positive."""
    m = np.arange(1, degree + 1)[:, None]
    waves = math.sqrt(2) * np.sin(m * angles)[::-1], np.ones((1, len(angles))), math.sqrt(2) * np.cos(m * angles)
    return np.concatenate(waves)


class Sphere:
    """The grid on which the product of two functions of degree L, integrated against degree L, is exact."""

    def __init__(self, degree: int):
        points = 3 * degree + 1
        nodes, weights = np.polynomial.legendre.leggauss(-(-points // 2))
        around = fourier(degree, 2 * np.pi * np.arange(points) / points)
        self.up, self.around = np.float32(legendre(degree, nodes)), np.float32(around)
        self.down = np.float32(legendre(degree, nodes) * weights * 2 * np.pi / points)

    def values(self, x: jax.Array) -> jax.Array:
        """Coefficients [..., L + 1, 2L + 1] -> values on the grid [..., latitudes, longitudes]."""
        return jnp.einsum("...mt,mp->...tp", jnp.einsum("...lm,lmt->...mt", x, self.up), self.around)

    def coefficients(self, values: jax.Array) -> jax.Array:
        """Values on the grid -> coefficients [..., L + 1, 2L + 1]."""
        return jnp.einsum("...mt,lmt->...lm", jnp.einsum("...tp,mp->...mt", values, self.around), self.down)

    def product(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the Gaunt tensor product of coefficients [..., L + 1, 2L + 1], in O(L^3) operations."""
        return self.coefficients(self.values(x) * self.values(y))


def gaunt_tensor(degree: int) -> np.ndarray:
    """Return the integrals of all triples of harmonics in `packed` order, [(L + 1)^2] * 3, summed on a finer grid."""
    nodes, weights = np.polynomial.legendre.leggauss(3 * degree + 2)
    angles = np.linspace(0, 2 * np.pi, 6 * degree + 3, endpoint=False)
    grid = np.einsum("lmt,mp->lmtp", legendre(degree, nodes), fourier(degree, angles))
    y, area = grid[packed(degree)].reshape((degree + 1) ** 2, -1), np.repeat(weights, len(angles)) * angles[1]
    return np.einsum("ap,bp,cp->abc", y * area, y, y, optimize=True).astype(np.float32)


def packed(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the (L + 1)^2 coefficients that exist among [L + 1, 2L + 1]."""
    degrees, orders = np.mgrid[: degree + 1, -degree : degree + 1]
    return np.nonzero(np.abs(orders) <= degrees)


def harmonics(degree: int, x: jax.Array) -> jax.Array:
    """Return the harmonics [..., L + 1, 2L + 1] of unit vectors [..., 3]; these polynomials have gradients anywhere."""
    z, around, table = x[..., 2], jnp.ones_like(x[..., 0]) + 0j, {}
    for m in range(degree + 1):  # `around` is sin^m(polar angle) exp(i m longitude)
        before, value = 0.0, jnp.full_like(z, math.prod(range(1, 2 * m, 2)))
        for n in range(m, degree + 1):
            scale = norm(n, m) * (math.sqrt(2) if m else 1.0)
            table[n, m], table[n, -m] = scale * value * around.real, scale * value * (around.imag if m else 1.0)
            before, value = value, ((2 * n + 1) * z * value - (n + m) * before) / (n - m + 1)
        around = around * (x[..., 0] + 1j * x[..., 1])
    zero, orders = jnp.zeros_like(z), range(-degree, degree + 1)
    rows = [jnp.stack([table.get((n, m), zero) for m in orders], -1) for n in range(degree + 1)]
    return jnp.stack(rows, -2)


def pairs(positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions [B, N, 3] -> (distances [B, N, N - 1], unit vectors [..., 3], smooth cutoff) of all other atoms."""
    others = np.array([[j for j in range(ATOMS) if j != i] for i in range(ATOMS)])
    difference = positions[:, others] - positions[:, :, None]
    distance = jnp.sqrt(jnp.sum(difference**2, -1))
    inside = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(distance / CUTOFF, 1)))
    return distance, difference / distance[..., None], inside


class Potential(nnx.Module):
    """Energies of clusters from densities of neighbours and two Gaunt products of them."""

    def __init__(self, degree: int, rngs: nnx.Rngs):
        self.degree = degree
        shape = (3, degree + 1, CHANNELS, CHANNELS)  # each degree has its own mix of the channels
        self.mix = nnx.Param(jax.random.normal(rngs.params(), shape) * CHANNELS**-0.5)
        self.up, self.out = nnx.Linear(3 * CHANNELS, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.line = nnx.Linear(3 * CHANNELS, 1, rngs=rngs)

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Positions [B, N, 3] -> energies [B]."""
        distance, direction, inside = pairs(positions)
        centres = jnp.linspace(0.8, CUTOFF, CHANNELS)
        radial = jnp.exp(-4 * (distance[..., None] - centres) ** 2) * inside[..., None]
        density = jnp.einsum("bijc,bijlm->bilmc", radial, harmonics(self.degree, direction))
        a, b, c = jnp.einsum("bilmc,slcd->sbidlm", density, self.mix[...])
        sphere = Sphere(self.degree)
        double = sphere.product(a, b)
        scalars = jnp.concatenate([x[..., 0, self.degree] for x in (a, double, sphere.product(double, c))], -1)
        return jnp.sum(self.line(scalars) + self.out(nnx.silu(self.up(scalars))), (1, 2))


def true_energy(positions: jax.Array) -> jax.Array:
    """Each angle at an atom costs (cos angle + 1/3)^2, which is zero in a tetrahedron, [B, N, 3] -> [B]."""
    _, direction, inside = pairs(positions)
    cosines = jnp.einsum("bijx,bikx->bijk", direction, direction)
    angles = (cosines + 1 / 3) ** 2 * inside[..., None] * inside[..., None, :]
    return jnp.sum(jnp.triu(angles, 1), (1, 2, 3))


def forces(energy: Any, positions: jax.Array) -> jax.Array:
    """Return the negative gradient of the energies, [B, N, 3]."""
    return -jax.grad(lambda x: jnp.sum(energy(x)))(positions)


def clusters(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return random clusters whose atoms keep a distance, with their forces."""
    random, kept = np.random.default_rng(seed), []
    while len(kept) < count:
        x = random.uniform(-1.8, 1.8, (ATOMS, 3))
        if np.min(np.linalg.norm(x[:, None] - x, axis=-1) + 9 * np.eye(ATOMS)) > 0.8:
            kept.append(x)
    positions = np.array(kept, np.float32)
    return {"positions": positions, "forces": np.asarray(forces(true_energy, positions))}


def force_error(model: Any, batch: Any) -> jax.Array:
    """Mean squared error of the forces."""
    return jnp.mean((forces(model, batch["positions"]) - batch["forces"]) ** 2)


def train(degree: int, rows: dict[str, np.ndarray], steps: int, seed: int) -> Any:
    """Return the trained potential of this degree."""
    trainer = Trainer(
        lambda rngs: Potential(degree, rngs), force_error, numpy_batches(rows, BATCH, seed),
        optimizer=AdamW(learning_rate=1e-2, weight_decay=0.0), schedule=Cosine(final_fraction=0.01),
        train=TrainConfig(steps=steps, global_batch_size=BATCH), seed=seed,
    )  # fmt: skip
    trainer.fit()
    return trainer.trained_module


def cost(function: Any, *inputs: Any) -> tuple[float, float]:
    """Return (operations that XLA counts, seconds of the fastest of five calls)."""
    compiled, seconds = jax.jit(function).lower(*inputs).compile(), []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - began)
    return float(compiled.cost_analysis()["flops"]), min(seconds)


def dense_product(x: jax.Array, y: jax.Array, tensor: jax.Array) -> jax.Array:
    """Contract packed coefficients [B, (L + 1)^2] with all Gaunt coefficients, in O(L^6) operations."""
    return jnp.einsum("na,nb->nab", x, y).reshape(len(x), -1) @ tensor.reshape(-1, tensor.shape[-1])


def costs(degrees: tuple[int, ...], rows: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Return the costs of the products on the grid and by contraction, [degrees, (operations, seconds)] each."""
    grid, dense, random = [], [], np.random.default_rng(0)
    for degree in degrees:
        x, size = random.normal(size=(2, rows, degree + 1, 2 * degree + 1)).astype(np.float32), (degree + 1) ** 2
        grid.append(cost(Sphere(degree).product, *x))
        tensor = random.normal(size=(size,) * 3).astype(np.float32)  # the cost does not depend on its values
        dense.append(cost(dense_product, *x[:, :, *packed(degree)], tensor))
    return np.array(grid), np.array(dense)


def contraction_error(degree: int) -> float:
    """Return the largest difference between the product on the grid and the contraction, on random coefficients."""
    place, x = packed(degree), np.random.default_rng(0).normal(size=(2, 64, degree + 1, 2 * degree + 1))
    dense = dense_product(*x[:, :, *place].astype(np.float32), gaunt_tensor(degree))
    return float(jnp.max(jnp.abs(Sphere(degree).product(*x.astype(np.float32))[:, *place] - dense)))


def equivariance_error(energy: Any, positions: np.ndarray, seed: int) -> float:
    """Return how far forces on rotated clusters are from rotated forces, relative to their size."""
    turn = Rotation.random(random_state=seed).as_matrix().astype(np.float32)
    before, after = (np.asarray(forces(energy, x)) for x in (positions, positions @ turn.T))
    return float(np.max(np.abs(after - before @ turn.T)) / np.std(before))


def main(steps: int = 1000, seed: int = 0, degrees: tuple[int, ...] = (4, 8, 16)) -> dict[str, Any]:
    """Measure both products, and train potentials with and without directions."""
    grid, dense = costs(degrees)
    slopes = [np.log(cost[-1] / cost[0]) / np.log(degrees[-1] / degrees[0]) for cost in (grid, dense)]
    rows, unseen = clusters(2000, seed), clusters(200, seed + 1000)
    models = [train(degree, rows, steps, seed) for degree in (3, 0)]
    errors = [float(np.sqrt(force_error(model, unseen) / np.mean(unseen["forces"] ** 2))) for model in models]
    turned, exact = equivariance_error(models[0], unseen["positions"], seed), contraction_error(4)
    return {
        "claim": "Tensor products through functions on the sphere cost O(L^3) in place of O(L^6).",
        "paper": "arXiv:2401.10216",
        "measure": f"exponent of the operations, L = {degrees[0]} to {degrees[-1]}; baseline: contraction",
        "ours": float(slopes[0][0]), "baseline": float(slopes[1][0]), "published": 3.0,
        "checks": {
            "operations grow by an exponent of at most 3.3": bool(slopes[0][0] <= 3.3),
            "those of the contraction by at least 5": bool(slopes[1][0] >= 5),
            "equal to the contraction to 1e-5": exact <= 1e-5,
            "forces turn with the cluster to 1e-4": turned < 1e-4,
            "error of forces at least 5 times below L = 0": errors[0] <= errors[1] / 5,
        },
        "numbers": {
            "exponent of time, grid": float(slopes[0][1]), "exponent of time, contraction": float(slopes[1][1]),
            f"speedup at L = {degrees[1]}": float(dense[1, 1] / grid[1, 1]),
            "relative error of forces, L = 3": errors[0], "relative error of forces, L = 0": errors[1],
        },
        "picture": [{"title": "log10 of the operations of 512 products", "x_label": "L", "curves": {
            name: [(d, float(np.log10(c[0]))) for d, c in zip(degrees, cost, strict=True)]
            for name, cost in {"on the grid": grid, "contraction": dense}.items()}}],
    }  # fmt: skip


if __name__ == "__main__":
    for name, value in main().items():
        if name != "picture":
            print(f"{name}: {value}")
