"""The Muon optimizer for the matrices of hidden layers, with AdamW for all other parameters."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.optim.base import ADAM_WIDTH_POWERS, MatrixOptimizer, RunInfo
from jaxstack.parallel.mesh import spread
from jaxstack.parameter_paths import map_by_path

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's iteration. Its slope at 0 is so steep that five steps bring singular values of 0.01 to 1
near 1."""


class Muon(MatrixOptimizer):
    """Muon: orthogonalized momentum (Jordan 2024, https://kellerjordan.github.io/posts/muon).

    Updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that AdamW's learning rates and
    weight decays fit. Embeddings, output head and vectors are updated by AdamW. State: one float32 per weight, two
    for AdamW's.
    """

    width_powers = ADAM_WIDTH_POWERS
    # A matrix whose elements have a fixed mean square and whose singular values are equal stretches by sqrt(width).
    matrix_width_power = -0.5
    name: Literal["muon"] = "muon"
    weight_decay: float = Field(default=0.1, ge=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum, of Nesterov's kind."""
    iterations: int = Field(default=5, ge=1)
    """Number of Newton-Schulz iterations, three matmuls each."""
    iteration_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the operands of these matmuls (float32 on NVIDIA GPUs: TF32)."""
    rms: float = Field(default=0.2, gt=0)
    """Root mean square of a matrix's update, before the learning rate."""

    def matrix_core(self, run: RunInfo) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(lambda updates, _: map_by_path(self._equalise, updates)),
        )

    def _equalise(self, path: str, update: jax.Array) -> jax.Array:
        rule = self.rule(path)
        cut = update.ndim - rule.outputs
        start = cut - rule.inputs
        sides = math.prod(update.shape[start:cut]), math.prod(update.shape[cut:])
        matrix = update.reshape(*update.shape[:start], *sides)
        found = orthogonalise(matrix, self.iterations, jnp.dtype(self.iteration_dtype))
        # An orthogonal matrix has the root mean square 1 / sqrt(its longer side).
        return found.reshape(update.shape) * (self.rms * math.sqrt(max(sides)))


def orthogonalise(
    x: Float[Array, "*stack m n"], iterations: int = 5, dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "*stack m n"]:
    """Return x with each matrix U S V^T replaced by about U V^T, with singular values from 0.7 to 1.2 instead of 1.

    The quintic Newton-Schulz iteration of Jordan 2024. The longer side is sharded over devices, so that an iteration
    sums a matrix [m, m] over them and needs no all-gather.

    Args:
      x: matrices, float32.
      iterations: number of iterations.
      dtype: of the operands of matmuls.
    """
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)
    x = spread(x)
    a, b, c = QUINTIC
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        # Only this product is summed over devices. Its square would be computed in full on each of them.
        gram = product(x, x.mT).astype(dtype)
        once = product(gram, x)
        return (a * x + b * once + c * product(gram, once.astype(dtype))).astype(dtype)

    with jax.named_scope("newton_schulz"):
        x = jax.lax.fori_loop(0, iterations, step, x).astype(jnp.float32)
    return x if wide else x.mT
