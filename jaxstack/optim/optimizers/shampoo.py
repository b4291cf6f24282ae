"""Shampoo with Adam grafting."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from pydantic import Field

from jaxstack.optim.base import RunFacts
from jaxstack.optim.blocks import Blocks, cut, refresh
from jaxstack.optim.matrices import MatrixOptimizer
from jaxstack.tree_rules import map_by_path


class ShampooState(NamedTuple):
    """State of the matrices."""

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
    """left^(-1/4) as of the last refresh."""
    right_root: PyTree
    """right^(-1/4) as of the last refresh."""


_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Shampoo(MatrixOptimizer):
    """Shampoo: preconditions gradients G as L^(-1/4) G R^(-1/4) (Gupta et al. 2018, arXiv:1802.09568).

    Each block's update is scaled to the norm of Adam's (grafting). Roots are refreshed on the devices that store them,
    as in Distributed Shampoo (Shi et al. 2023, arXiv:2309.06497). Embeddings, output head and vectors are updated by
    AdamW.
    State: six float32 per weight of a matrix whose blocks are square, two for AdamW's.
    """

    name: Literal["shampoo"] = "shampoo"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    factor_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the factors."""
    root_eps: float = Field(default=1e-5, gt=0)
    """Added to the eigenvalues of a factor, as a share of the largest."""
    block_size: int = Field(default=1024, ge=1)
    """Largest number of rows and columns of a block. A block is best a divisor of a device's part of each matrix."""
    refresh_every: int = Field(default=10, ge=1)
    """Steps between two refreshes of a block's roots; blocks take turns."""

    def blocks(self, path: str, shape: tuple[int, ...]) -> Blocks:
        """Return the blocks that the parameter at this path is cut into."""
        rule = self.rule(path)
        return cut(shape, rule.inputs, rule.outputs, self.block_size)

    def matrix_core(self, run: RunFacts) -> optax.GradientTransformation:
        def init(params: PyTree) -> ShampooState:
            def square(path: str, p: jax.Array, right: bool) -> jax.Array:
                b = self.blocks(path, p.shape)
                size = b.columns[1] if right else b.rows[1]
                return jnp.zeros((*b.grid, size, size), jnp.float32)

            make = lambda right: map_by_path(functools.partial(square, right=right), params)  # noqa: E731
            mu, nu = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
            return ShampooState(jnp.zeros((), jnp.int32), mu, nu, make(False), make(True), make(False), make(True))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, ShampooState]:
            one = functools.partial(self._update, run, state.steps)
            results = map_by_path(one, updates, *state[1:])
            pick = lambda index: jax.tree.map(lambda _, result: result[index], updates, results)  # noqa: E731
            return pick(0), ShampooState(state.steps + 1, *(pick(index) for index in range(1, 7)))

        return optax.GradientTransformation(init, update)

    def _update(
        self, run: RunFacts, count: jax.Array, path: str, gradient: jax.Array, mu: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return the direction and the new state of one parameter."""
        nu, left, right, left_root, right_root = others
        blocks = self.blocks(path, gradient.shape)
        g = blocks.split(gradient)
        mu = self.b1 * mu + (1 - self.b1) * gradient
        nu = self.b2 * nu + (1 - self.b2) * gradient**2
        left = self.factor_decay * left + (1 - self.factor_decay) * _product("...ij,...kj->...ik", g, g)
        right = self.factor_decay * right + (1 - self.factor_decay) * _product("...ji,...jk->...ik", g, g)
        due = blocks.due(path, count, self.refresh_every)
        left_root, right_root = refresh(
            count == 0,
            due,
            self._roots,
            self._roots,
            (left, right),
            (left_root, right_root),
            blocks,
            run.specs.get(path),
        )
        m = mu / (1 - self.b1 ** (count + 1))
        adam = blocks.split(m / (jnp.sqrt(nu / (1 - self.b2 ** (count + 1))) + self.eps))
        step = _product("...ij,...jk,...kl->...il", left_root, blocks.split(m), right_root)
        norm = lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)  # noqa: E731
        size = norm(step)
        step = step * jnp.where(size > 0, norm(adam) / jnp.where(size > 0, size, 1), 0)
        return blocks.join(step), mu, nu, left, right, left_root, right_root

    def _roots(self, left: jax.Array, right: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        return inverse_fourth_root(left, self.root_eps), inverse_fourth_root(right, self.root_eps)


def inverse_fourth_root(factor: Float[Array, "n n"], eps: float) -> Float[Array, "n n"]:
    """Return (factor + eps x its largest eigenvalue x identity)^(-1/4); zeros for a factor of zero."""
    values, vectors = jnp.linalg.eigh(factor)
    values = jnp.maximum(values, 0) + eps * values[-1]
    roots = jnp.where(values > 0, jnp.where(values > 0, values, 1) ** -0.25, 0)
    return _product("ik,k,jk->ij", vectors, roots, vectors)
