"""The Sophia-G optimizer, which divides momentum by an estimate of the diagonal curvature."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.optim.base import Optimizer, RunInfo, SampledGradient


class SophiaState(NamedTuple):
    """Optimizer state of Sophia: momentum, and an estimate of the diagonal curvature."""

    mu: PyTree
    """First moments."""
    curvature: PyTree
    """Moving averages of the estimates of the diagonal of the Gauss-Newton matrix."""


class Sophia(Optimizer):
    """Sophia: momentum / curvature, clipped elementwise (Liu et al. 2023, arXiv:2305.14342).

    State: two float32 per weight. The curvature is Sophia-G's Gauss-Newton-Bartlett estimate: every `curvature_every`
    steps a second gradient, with labels sampled from the model's own predictions. The loss must define how to sample
    them (`jaxstack.loss.samples_labels`), as that of language models does.
    """

    name: Literal["sophia"] = "sophia"
    learning_rate: float = Field(default=6e-4, gt=0)
    weight_decay: float = Field(default=0.2, ge=0)
    b1: float = Field(default=0.965, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)
    rho: float = Field(default=0.05, gt=0)
    """Multiple of the curvature that divides the momentum. Half to nine tenths of the update should not be clipped."""
    curvature_every: int = Field(default=10, ge=1)
    """Steps between two estimates of the curvature."""
    eps: float = Field(default=1e-15, gt=0)

    @property
    def sampled_gradient(self) -> SampledGradient:
        """The Gauss-Newton-Bartlett estimate: the square of the mean gradient over sampled labels, times their number.

        See Liu et al. 2023, arXiv:2305.14342, algorithm 2.
        """

        def estimate(gradients: PyTree, count: jax.Array) -> PyTree:
            return jax.tree.map(lambda g: g**2 / jnp.maximum(count, 1.0), gradients)

        return SampledGradient("curvature", self.curvature_every, estimate)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        def init(params: PyTree) -> SophiaState:
            def zeros():
                return jax.tree.map(jnp.zeros_like, params)

            return SophiaState(zeros(), zeros())

        def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SophiaState]:
            curvature = extra["curvature"]
            renewed = extra["renewed"]
            mu = optax.tree.update_moment(updates, state.mu, self.b1, 1)

            def is_masked(x):
                return isinstance(x, optax.MaskedNode)

            def average(old: jax.Array | optax.MaskedNode, new: jax.Array) -> jax.Array | optax.MaskedNode:
                if isinstance(old, optax.MaskedNode):
                    return old
                return jnp.where(renewed, self.b2 * old + (1 - self.b2) * new, old)

            held = jax.tree.map(average, state.curvature, curvature, is_leaf=is_masked)

            def clipped(m, h):
                return jnp.clip(m / jnp.maximum(self.rho * h, self.eps), -1.0, 1.0)

            return jax.tree.map(clipped, mu, held), SophiaState(mu, held)

        return optax.GradientTransformationExtraArgs(init, update)
