"""Base class of methods that correct later columns of a matrix for the errors of earlier ones."""

import warnings
from typing import ClassVar

from jaxtyping import Array, Bool, Float
from pydantic import Field

from jaxstack.compress.column_sweep import DAMPING
from jaxstack.compress.methods.base import InputStatistics, Method, Statistic


class ColumnSweepMethod(Method):
    """Base of methods that compress column by column, with corrections from the Hessian of a layer's inputs."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"hessian"})
    damping: float = Field(default=DAMPING, gt=0)
    """Share of the mean of the Hessian's diagonal that is added to the diagonal."""

    @staticmethod
    def hessian(statistics: InputStatistics | None) -> Float[Array, "in in"]:
        """Return the Hessian of a layer's inputs from the statistics that calibration measured."""
        assert statistics is not None and statistics.hessian is not None
        return statistics.hessian

    def warn_unless(self, valid: Bool[Array, ""], fallback: str) -> None:
        """Warn, unless `valid`, that the Hessian could not be factorized, and say what was done instead.

        Args:
          valid: `jaxstack.compress.column_sweep.Factor.valid`.
          fallback: what was done with the weights, such as `rounded to the nearest values`.
        """
        if not valid:
            warnings.warn(
                f"the Hessian is not positive definite with damping {self.damping}, so the weights were {fallback} "
                "without corrections; raise damping, or use more calibration text.",
                stacklevel=3,
            )
