"""The Shampoo optimizer, whose update sizes are those of Adam (grafting)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from pydantic import Field

from jaxstack.optim.base import RunInfo
from jaxstack.optim.block_preconditioning import BlockOptimizer, exact_einsum


class ShampooState(NamedTuple):
    """Optimizer state of Shampoo: moments, gradient statistics and preconditioners."""

    steps: jax.Array
    """[] int32: steps taken."""
    mu: PyTree
    """First moments, of the parameters' shapes."""
    nu: PyTree
    """Second moments, for the norm of Adam's step."""
    left: PyTree
    """Moving averages of G G^T of each block."""
    right: PyTree
    """Moving averages of G^T G of each block."""
    left_root: PyTree
    """left^(-1/4) at the last refresh."""
    right_root: PyTree
    """right^(-1/4) at the last refresh."""


class Shampoo(BlockOptimizer):
    """Shampoo: preconditions gradients G as L^(-1/4) G R^(-1/4) (Gupta et al. 2018, arXiv:1802.09568).

    Each block's update is scaled to the norm of Adam's (grafting). Roots are refreshed on the devices that store them,
    as in Distributed Shampoo (Shi et al. 2023, arXiv:2309.06497). Embeddings, output head and vectors are updated by
    AdamW.
    State: six float32 per weight of a matrix whose blocks are square, two for AdamW's.
    """

    name: Literal["shampoo"] = "shampoo"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    root_eps: float = Field(default=1e-5, gt=0)
    """Added to the eigenvalues of a factor, as a share of the largest."""

    def init_state(self, params: PyTree) -> ShampooState:
        mu = jax.tree.map(jnp.zeros_like, params)
        nu = jax.tree.map(jnp.zeros_like, params)
        return ShampooState(jnp.zeros((), jnp.int32), mu, nu, *self.zero_factors(params), *self.zero_factors(params))

    def update_parameter(
        self, run: RunInfo, count: jax.Array, path: str, gradient: jax.Array, *state: jax.Array
    ) -> tuple[jax.Array, ...]:
        mu, nu, left, right, left_root, right_root = state
        blocks = self.blocks(path, gradient.shape)
        g = blocks.split(gradient)
        mu = self.b1 * mu + (1 - self.b1) * gradient
        nu = self.b2 * nu + (1 - self.b2) * gradient**2
        factors = self.average_factors(left, right, g)
        roots = self.refresh(run, count, path, blocks, factors, (left_root, right_root), self._roots, self._roots)
        m = mu / (1 - self.b1 ** (count + 1))
        adam = blocks.split(m / (jnp.sqrt(nu / (1 - self.b2 ** (count + 1))) + self.eps))
        step = exact_einsum("...ij,...jk,...kl->...il", roots[0], blocks.split(m), roots[1])

        def norm(x):
            return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)

        size = norm(step)
        step = step * jnp.where(size > 0, norm(adam) / jnp.where(size > 0, size, 1), 0)
        return blocks.join(step), mu, nu, *factors, *roots

    def _roots(self, left: jax.Array, right: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        return inverse_fourth_root(left, self.root_eps), inverse_fourth_root(right, self.root_eps)


def inverse_fourth_root(factor: Float[Array, "n n"], eps: float) -> Float[Array, "n n"]:
    """Return the damped inverse fourth root of a Shampoo factor (L or R); a zero matrix for a zero factor.

    It is (factor + eps x its largest eigenvalue x identity)^(-1/4).
    """
    values, vectors = jnp.linalg.eigh(factor)
    values = jnp.maximum(values, 0) + eps * values[-1]
    roots = jnp.where(values > 0, jnp.where(values > 0, values, 1) ** -0.25, 0)
    return exact_einsum("ik,k,jk->ij", vectors, roots, vectors)
