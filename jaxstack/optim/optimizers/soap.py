"""The SOAP optimizer: Adam in the eigenbasis of Shampoo's preconditioner."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from pydantic import Field

from jaxstack.optim.base import ADAM_WIDTH_POWERS, RunInfo
from jaxstack.optim.block_preconditioning import BlockOptimizer, exact_einsum


class SoapState(NamedTuple):
    """Optimizer state of SOAP: Adam's moments, Shampoo's factors, and the eigenbases that rotate the gradients."""

    steps: jax.Array
    """[] int32: steps taken."""
    mu: PyTree
    """First moments, of the parameters' shapes."""
    nu: PyTree
    """Second moments of the rotated gradients, by blocks."""
    left: PyTree
    """Moving averages of G G^T of each block."""
    right: PyTree
    """Moving averages of G^T G of each block."""
    left_basis: PyTree
    """Approximate eigenvectors of `left`."""
    right_basis: PyTree
    """Approximate eigenvectors of `right`."""


_FIRST_ITERATIONS = 5
"""Number of power iterations at the first step."""


class Soap(BlockOptimizer):
    """Adam on gradients rotated into the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321).

    Matrices are cut into blocks, whose bases are refreshed on the devices that store them. The first step only starts
    the factors. Bases start from the identity, not from an eigendecomposition, and are never sorted: both would depend
    on rounding, and so on the layout, where eigenvalues are equal. Embeddings, output head and vectors are updated by
    AdamW. State: six float32 per weight of a matrix whose blocks are square, two for AdamW's.
    """

    width_powers = ADAM_WIDTH_POWERS
    name: Literal["soap"] = "soap"
    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    b1: float = Field(default=0.95, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)

    def init_state(self, params: PyTree) -> SoapState:
        mu = jax.tree.map(jnp.zeros_like, params)
        nu = self.zeros_by_block(params, lambda rows, columns: (rows, columns))
        return SoapState(jnp.zeros((), jnp.int32), mu, nu, *self.zero_factors(params), *self.zero_factors(params))

    def update_parameter(
        self, run: RunInfo, count: jax.Array, path: str, gradient: jax.Array, *state: jax.Array
    ) -> tuple[jax.Array, ...]:
        mu, nu, left, right, left_basis, right_basis = state
        blocks = self.blocks(path, gradient.shape)
        first = count == 0
        rotate = functools.partial(exact_einsum, "...ij,...ik,...jl->...kl")
        g = blocks.split(gradient)
        new_mu = jnp.where(first, mu, self.b1 * mu + (1 - self.b1) * gradient)
        rotated = rotate(g, left_basis, right_basis)
        nu = jnp.where(first, nu, self.b2 * nu + (1 - self.b2) * rotated**2)
        steps = jnp.maximum(count, 1)
        m = rotate(blocks.split(new_mu), left_basis, right_basis) / (1 - self.b1**steps)
        step = m / (jnp.sqrt(nu / (1 - self.b2**steps)) + self.eps)
        direction = blocks.join(exact_einsum("...kl,...ik,...jl->...ij", step, left_basis, right_basis))
        factors = self.average_factors(left, right, g)
        bases = self.refresh(run, count, path, blocks, factors, (left_basis, right_basis), _start, _renew)
        return direction, new_mu, nu, *factors, *bases


def _start(left: jax.Array, right: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return initial eigenbases of SOAP's left and right factors, found by power iterations from the identity."""
    bases = jnp.eye(left.shape[0]), jnp.eye(right.shape[0])
    return jax.lax.fori_loop(0, _FIRST_ITERATIONS, lambda _, bases: _renew(left, right, *bases), bases)


def _renew(
    left: jax.Array, right: jax.Array, left_basis: jax.Array, right_basis: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return renew_basis(left, left_basis), renew_basis(right, right_basis)


def renew_basis(factor: Float[Array, "n n"], basis: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Refine an approximate eigenbasis of a SOAP factor (left or right) by one step of power iteration with QR.

    A tenth of the mean eigenvalue is added to all of them: without it, some vectors of a rank-deficient factor (as in
    the first steps) would be rounding errors, which differ between layouts.
    """
    ridge = 0.1 * jnp.trace(factor) / factor.shape[0]
    return jnp.linalg.qr(exact_einsum("ij,jk->ik", factor, basis) + ridge * basis)[0]
