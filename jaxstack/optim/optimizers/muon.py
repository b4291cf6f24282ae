"""Muon for the matrices of hidden layers, AdamW for all else."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jaxstack.config.base import PathRule
from jaxstack.errors import ConfigError
from jaxstack.optim.base import Optimizer, is_matrix
from jaxstack.parallel.mesh import spread
from jaxstack.tree_rules import check_patterns, map_by_path, match

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Of Jordan's iteration: steep at 0, so that five steps bring singular values of 0.01 and of 1 near 1."""


class MatrixRule(PathRule):
    """Which dims of a parameter are a matrix's. Those before them count matrices: layers, experts."""

    inputs: int = Field(default=1, ge=1)
    """How many dims, before the outputs' ones, are summed over."""
    outputs: int = Field(default=1, ge=1)
    """How many of the last dims are the matrix's other side."""
    adamw: bool = False
    """AdamW moves it, as what is no matrix."""


KNOWN = (
    MatrixRule(path=r"(^|/)(\w*embed\w*|\w*head)(/|$)", adamw=True),
    MatrixRule(path=r"(^|/)[qkv]_proj/(kernel|adapter/b)$", outputs=2),
    MatrixRule(path=r"(^|/)o_proj/(kernel|adapter/a)$", inputs=2),
    MatrixRule(path=".*"),
)
"""Heads of attention are one side of their matrix together. Rules of a configuration come before these."""


class Muon(Optimizer):
    """Momentum with its singular values made equal (Jordan 2024, https://kellerjordan.github.io/posts/muon), as large
    as AdamW's updates (Liu et al. 2025, arXiv:2502.16982), so that AdamW's learning rates and weight decays fit;
    embeddings, output head and vectors by AdamW. State: one float32 a parameter, two by AdamW.
    """

    name: Literal["muon"] = "muon"
    weight_decay: float = Field(default=0.1, ge=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Nesterov's."""
    iterations: int = Field(default=5, ge=1)
    """Of Newton and Schulz, each three matrix products."""
    iteration_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of these products' operands (float32 on NVIDIA GPUs: TF32)."""
    rms: float = Field(default=0.2, gt=0)
    """Root mean square of a matrix's update, times the learning rate."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    matrices: tuple[MatrixRule, ...] = ()

    def core(self) -> optax.GradientTransformation:
        muon = optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(lambda updates, _: map_by_path(self._equalise, updates)),
        )
        adamw = optax.scale_by_adam(self.b1, self.b2, self.eps)

        def labels(tree: Any) -> Any:
            return map_by_path(lambda path, leaf: "muon" if self._is_ours(path, leaf) else "adamw", tree)

        return optax.partition({"muon": muon, "adamw": adamw}, labels)

    def check(self, params: Any) -> None:
        super().check(params)
        check_patterns([rule.path for rule in self.matrices], params, "optimizer.matrices")

        def fits(path: str, leaf: Any) -> None:
            rule = self._rule(path)
            if self._is_ours(path, leaf) and len(leaf.shape) < rule.inputs + rule.outputs:
                raise ConfigError(
                    f"optimizer.matrices: {rule.path!r} takes {rule.inputs} + {rule.outputs} dims for a matrix, but "
                    f"{path} has the shape {tuple(leaf.shape)}; lower inputs or outputs, or give it adamw: true."
                )

        map_by_path(fits, params)

    def _rule(self, path: str) -> MatrixRule:
        return match(path, [(rule.path, rule) for rule in (*self.matrices, *KNOWN)])

    def _is_ours(self, path: str, leaf: Any) -> bool:
        return is_matrix(path, leaf) and not self._rule(path).adamw

    def _equalise(self, path: str, update: jax.Array) -> jax.Array:
        rule = self._rule(path)
        cut = update.ndim - rule.outputs
        start = cut - rule.inputs
        sides = math.prod(update.shape[start:cut]), math.prod(update.shape[cut:])
        matrix = update.reshape(*update.shape[:start], *sides)
        found = orthogonalise(matrix, self.iterations, jnp.dtype(self.iteration_dtype))
        # An orthogonal matrix has the root mean square 1 / sqrt(its longer side).
        return found.reshape(update.shape) * (self.rms * math.sqrt(max(sides)))


def orthogonalise(x: jax.Array, iterations: int = 5, dtype: Any = jnp.float32) -> jax.Array:
    """U V^T, nearly, of every matrix U S V^T in x [..., m, n] float32: singular values come to lie between 0.7 and 1.2.

    The quintic Newton-Schulz iteration of Jordan 2024. Several devices have parts of the longer side, so that an
    iteration sums [m, m] over them and gathers nothing.
    """
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)
    x = spread(x)
    a, b, c = QUINTIC
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

    def step(_: Any, x: jax.Array) -> jax.Array:
        # The one thing that devices sum; its square would be the work of all on each of them.
        gram = product(x, x.mT).astype(dtype)
        once = product(gram, x)
        return (a * x + b * once + c * product(gram, once.astype(dtype))).astype(dtype)

    with jax.named_scope("newton_schulz"):
        x = jax.lax.fori_loop(0, iterations, step, x).astype(jnp.float32)
    return x if wide else x.mT
