"""The Adam-mini optimizer: Adam with one second moment for each group of weights."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.optim.base import HasShape, Optimizer, RunInfo, is_matrix
from jaxstack.parameter_paths import map_by_path, match

AVERAGED = (
    (r"embed\w*/table$", (-1,)),
    (r"(^|/)([qk]_proj|in_proj_[qk])/kernel$", (-3, -1)),
    (r"(^|/)(([vzxbc]|f_b|g_b)_proj|in_proj_[vz]|attention/gate_proj)/kernel$", (-3,)),
    (r"(^|/)(o|out)_proj/kernel$", (-3, -2)),
    (r"(^|/)[qkvzxbc]_proj/bias$", (-2, -1)),
)
"""Path -> dims over which squared gradients are averaged: all but the token of a table, the head of queries and keys,
the neuron of other outputs. Other matrices are averaged over their inputs, other vectors as a whole."""


class AdamMiniState(NamedTuple):
    """Optimizer state of Adam-mini: first moments, and one second moment for each group of weights."""

    steps: jax.Array
    """[] int32: steps taken."""
    mu: PyTree
    """First moments."""
    nu: PyTree
    """Second moments, of size 1 along the dims that they are averages over."""


class AdamMini(Optimizer):
    """AdamW with one second moment per head, neuron or token (Zhang et al. 2024, arXiv:2406.16793).

    State: one float32 per weight.
    """

    name: Literal["adam_mini"] = "adam_mini"
    weight_decay: float = Field(default=0.1, ge=0)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        def init(params: PyTree) -> AdamMiniState:
            mu = jax.tree.map(jnp.zeros_like, params)
            return AdamMiniState(jnp.zeros((), jnp.int32), mu, map_by_path(_averaged, mu))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, AdamMiniState]:
            count = state.steps + 1
            mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)
            squares = map_by_path(_averaged, jax.tree.map(jnp.square, updates))
            nu = optax.tree.update_moment(squares, state.nu, self.b2, 1)
            first = 1 - self.b1**count
            second = 1 - self.b2**count

            def direction(m, v):
                return (m / first) / (jnp.sqrt(v / second) + self.eps)

            return jax.tree.map(direction, mu, nu), AdamMiniState(count, mu, nu)

        return optax.GradientTransformation(init, update)


def _averaged(path: str, x: jax.Array) -> jax.Array:
    return jnp.mean(x, averaged_dims(path, x), keepdims=True)


def averaged_dims(path: str, leaf: HasShape) -> tuple[int, ...]:
    """Return the dims of a parameter, as negative indices, over which Adam-mini shares one second moment."""
    default = (-2,) if is_matrix(path, leaf) else (-1,) if leaf.shape else ()
    return match(path, [*AVERAGED, (".*", default)])
