"""Base class of optimizers that update matrices (Muon, Shampoo, SOAP), and rules for which dims form a matrix."""

from abc import abstractmethod
from typing import ClassVar

import optax
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.config.base import PathRule
from jaxstack.errors import ConfigError
from jaxstack.optim.base import HasShape, Optimizer, RunInfo, is_matrix
from jaxstack.parameter_paths import check_patterns, map_by_path, match


class MatrixShapeRule(PathRule):
    """Rule for parameters whose path matches a pattern: how many of their last dims form the two sides of a matrix."""

    inputs: int = Field(default=1, ge=1)
    """Number of dims, before the output dims, that are summed over."""
    outputs: int = Field(default=1, ge=1)
    """Number of last dims that form the other side of the matrix."""
    adamw: bool = False
    """Update these parameters by AdamW, as vectors are."""


KNOWN = (
    MatrixShapeRule(path=r"(^|/)(\w*embed\w*|\w*head)(/|$)", adamw=True),
    MatrixShapeRule(path=r"(^|/)[qkv]_proj/(kernel|adapter/b)$", outputs=2),
    MatrixShapeRule(path=r"(^|/)o_proj/(kernel|adapter/a)$", inputs=2),
    MatrixShapeRule(path=".*"),
)
"""Rules that follow those of the configuration. All heads of an attention projection are one side of one matrix."""


class MatrixOptimizer(Optimizer):
    """Base of optimizers for the matrices of hidden layers; AdamW updates embeddings, output head and vectors."""

    matrix_width_power: ClassVar[float] = -1.0
    """Exponent of the width in muP's learning rate of matrices; `width_powers` has those of AdamW's parameters."""

    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    matrices: tuple[MatrixShapeRule, ...] = ()

    @abstractmethod
    def matrix_core(self, run: RunInfo) -> optax.GradientTransformation:
        """Return the Optax transformation that updates the matrix parameters; AdamW updates all others."""

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        adamw = optax.scale_by_adam(self.b1, self.b2, self.eps)

        own = type(self).__name__.lower()

        def labels(tree: PyTree) -> PyTree:
            return map_by_path(lambda path, leaf: own if self.updates_as_matrix(path, leaf) else "adamw", tree)

        return optax.partition({own: self.matrix_core(run), "adamw": adamw}, labels)

    def check(self, params: PyTree) -> None:
        super().check(params)
        check_patterns([rule.path for rule in self.matrices], params, "optimizer.matrices")

        def fits(path: str, leaf: HasShape) -> None:
            rule = self.rule(path)
            if self.updates_as_matrix(path, leaf) and len(leaf.shape) < rule.inputs + rule.outputs:
                raise ConfigError(
                    f"optimizer.matrices: {rule.path!r} takes {rule.inputs} + {rule.outputs} dims for a matrix, but "
                    f"{path} has the shape {tuple(leaf.shape)}; lower inputs or outputs, or give it adamw: true."
                )

        map_by_path(fits, params)

    def rule(self, path: str) -> MatrixShapeRule:
        """Return the rule for which dims of a parameter form a matrix: the first whose pattern matches its path."""
        return match(path, [(rule.path, rule) for rule in (*self.matrices, *KNOWN)])

    def updates_as_matrix(self, path: str, leaf: HasShape) -> bool:
        """Return True if the matrix update rule applies to a parameter, False if AdamW updates it."""
        return is_matrix(path, leaf) and not self.rule(path).adamw
