"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from pydantic import Field

from jaxstack.optim.base import ADAM_WIDTH_POWERS, RunFacts
from jaxstack.optim.blocks import Blocks, cut, refresh
from jaxstack.optim.matrices import MatrixOptimizer
from jaxstack.tree_rules import map_by_path


class SoapState(NamedTuple):
    """State of the matrices."""

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
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Soap(MatrixOptimizer):
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
    factor_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the factors."""
    block_size: int = Field(default=1024, ge=1)
    """Largest number of rows and columns of a block. A block is best a divisor of a device's part of each matrix."""
    refresh_every: int = Field(default=10, ge=1)
    """Steps between two refreshes of a block's bases; blocks take turns."""

    def blocks(self, path: str, shape: tuple[int, ...]) -> Blocks:
        """Return the blocks that the parameter at this path is cut into."""
        rule = self.rule(path)
        return cut(shape, rule.inputs, rule.outputs, self.block_size)

    def matrix_core(self, run: RunFacts) -> optax.GradientTransformation:
        def init(params: PyTree) -> SoapState:
            def zeros(path: str, p: jax.Array, rows: bool, columns: bool) -> jax.Array:
                b = self.blocks(path, p.shape)
                sizes = (b.rows[1] if rows else b.columns[1], b.columns[1] if columns else b.rows[1])
                return jnp.zeros((*b.grid, *sizes), jnp.float32)

            make = lambda rows, columns: map_by_path(  # noqa: E731
                functools.partial(zeros, rows=rows, columns=columns), params
            )
            factors = make(True, False), make(False, True), make(True, False), make(False, True)
            mu = jax.tree.map(jnp.zeros_like, params)
            return SoapState(jnp.zeros((), jnp.int32), mu, make(True, True), *factors)

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, SoapState]:
            one = functools.partial(self._update, run, state.steps)
            results = map_by_path(one, updates, *state[1:])
            pick = lambda index: jax.tree.map(lambda _, result: result[index], updates, results)  # noqa: E731
            return pick(0), SoapState(state.steps + 1, *(pick(index) for index in range(1, 7)))

        return optax.GradientTransformation(init, update)

    def _update(
        self, run: RunFacts, count: jax.Array, path: str, gradient: jax.Array, mu: jax.Array, *factors: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return the direction and the new state of one parameter."""
        nu, left, right, left_basis, right_basis = factors
        blocks, first = self.blocks(path, gradient.shape), count == 0
        rotate = functools.partial(_product, "...ij,...ik,...jl->...kl")
        g = blocks.split(gradient)
        new_mu = jnp.where(first, mu, self.b1 * mu + (1 - self.b1) * gradient)
        rotated = rotate(g, left_basis, right_basis)
        nu = jnp.where(first, nu, self.b2 * nu + (1 - self.b2) * rotated**2)
        steps = jnp.maximum(count, 1)
        m = rotate(blocks.split(new_mu), left_basis, right_basis) / (1 - self.b1**steps)
        step = m / (jnp.sqrt(nu / (1 - self.b2**steps)) + self.eps)
        direction = blocks.join(_product("...kl,...ik,...jl->...ij", step, left_basis, right_basis))
        left = self.factor_decay * left + (1 - self.factor_decay) * _product("...ij,...kj->...ik", g, g)
        right = self.factor_decay * right + (1 - self.factor_decay) * _product("...ji,...jk->...ik", g, g)
        due = blocks.due(path, count, self.refresh_every)
        bases, spec = (left_basis, right_basis), run.specs.get(path)
        left_basis, right_basis = refresh(first, due, _start, _renew, (left, right), bases, blocks, spec)
        return direction, new_mu, nu, left, right, left_basis, right_basis


def _start(left: jax.Array, right: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the eigenbases of the first factors, by power iterations from the identity."""
    bases = jnp.eye(left.shape[0]), jnp.eye(right.shape[0])
    return jax.lax.fori_loop(0, _FIRST_ITERATIONS, lambda _, bases: _renew(left, right, *bases), bases)


def _renew(
    left: jax.Array, right: jax.Array, left_basis: jax.Array, right_basis: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return renew_basis(left, left_basis), renew_basis(right, right_basis)


def renew_basis(factor: Float[Array, "n n"], basis: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the basis after one power iteration with QR, which puts the largest eigenvalues first.

    A tenth of the mean eigenvalue is added to all of them: without it, some vectors of a rank-deficient factor (as in
    the first steps) would be rounding errors, which differ between layouts.
    """
    ridge = 0.1 * jnp.trace(factor) / factor.shape[0]
    return jnp.linalg.qr(_product("ij,jk->ik", factor, basis) + ridge * basis)[0]
