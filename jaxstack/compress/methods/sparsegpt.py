"""SparseGPT: pruning that corrects later columns for the zeros of earlier ones."""

import warnings
from typing import ClassVar, Literal

from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.compress.methods.base import Compressed, InputStatistics, Statistic
from jaxstack.compress.methods.pruning import PruningMethod
from jaxstack.compress.solve import DAMPING, sparsegpt


class SparseGpt(PruningMethod):
    """Prunes in blocks of columns and corrects the columns that follow (arXiv:2301.00774)."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"hessian"})
    method: Literal["sparsegpt"] = "sparsegpt"
    damping: float = Field(default=DAMPING, gt=0)
    """Share of the mean of the Hessian's diagonal that is added to the diagonal."""

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        assert statistics is not None and statistics.hessian is not None
        found = sparsegpt(w, statistics.hessian, self.zeros, self.damping)
        if not found.valid:
            warnings.warn(
                f"the Hessian is not positive definite with damping {self.damping}, so the weights were pruned by "
                "magnitude without corrections; raise damping, or use more calibration text.",
                stacklevel=2,
            )
        return found.w
