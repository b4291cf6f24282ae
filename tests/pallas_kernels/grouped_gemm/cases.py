"""Inputs of the grouped matmul, the operation written as a loop over groups, and the bound on errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_gemm.groups import aligned_rows
from tests.compilation import run_jitted


@dataclass(frozen=True)
class Case:
    """One call: sizes of the groups, D, F, alignment; rows that belong to no group at the end."""

    sizes: Sequence[int]
    depth: int = 16
    columns: int = 24
    alignment: int = 1
    spare: int = 0
    dtype: str = "bfloat16"

    @property
    def starts(self) -> list[int]:
        padded = [-(-size // self.alignment) * self.alignment for size in self.sizes]
        return [sum(padded[:index]) for index in range(len(padded))]

    @property
    def rows(self) -> int:
        return aligned_rows(sum(self.sizes) + self.spare, len(self.sizes), self.alignment)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, weights, cotangent as float64 of values that the dtype holds; x is 0 where no group is."""
        random = np.random.default_rng(0)

        def draw(*shape: int) -> np.ndarray:
            return np.asarray(jnp.asarray(random.normal(size=shape), self.dtype).astype(jnp.float32), np.float64)

        x = draw(self.rows, self.depth)
        cotangent = draw(self.rows, self.columns)
        mine = np.zeros((self.rows, 1), bool)
        for start, size in zip(self.starts, self.sizes, strict=True):
            mine[start : start + size] = True
        return np.where(mine, x, 0), draw(len(self.sizes), self.depth, self.columns), np.where(mine, cotangent, 0)


def run(case: Case, implementation: str | None) -> list[np.ndarray]:
    """out, dx, dW."""
    x, weights, cotangent = case.arrays()
    sizes = jnp.asarray(case.sizes, jnp.int32)

    def total(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = grouped_matmul(x, weights, sizes, alignment=case.alignment, implementation=implementation)
        return (out.astype(jnp.float32) * cotangent).sum(), out

    gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, out), gradients = run_jitted(gradient, jnp.asarray(x, case.dtype), jnp.asarray(weights, case.dtype), sizes)
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in (out, *gradients)]


def loop_over_groups(case: Case, dtype: str) -> list[np.ndarray]:
    """out, dx, dW of one matmul for each group, in `dtype`."""

    def loop(x: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = jnp.zeros((case.rows, case.columns), dtype)
        d_x = jnp.zeros_like(x)
        d_weights = jnp.zeros_like(weights)
        for group, (start, size) in enumerate(zip(case.starts, case.sizes, strict=True)):
            rows = slice(start, start + size)
            out = out.at[rows].set(x[rows] @ weights[group])
            d_x = d_x.at[rows].set(cotangent[rows] @ weights[group].T)
            d_weights = d_weights.at[group].set(x[rows].T @ cotangent[rows])
        return out, d_x, d_weights

    arrays = run_jitted(loop, *(jnp.asarray(a, dtype) for a in case.arrays()))
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


def check(case: Case, implementation: str | None) -> None:
    """The error against float32 is at most twice that of the plain matmuls in the case's dtype."""
    exact = loop_over_groups(case, "float32")
    plain = loop_over_groups(case, case.dtype)
    for name, found, low, wanted in zip(
        ("out", "d_x", "d_weights"), run(case, implementation), plain, exact, strict=True
    ):
        size = np.linalg.norm(wanted) + 1e-30
        error = np.linalg.norm(found - wanted) / size
        allowed = np.linalg.norm(low - wanted) / size
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.2e}, plainly {allowed:.2e}"
