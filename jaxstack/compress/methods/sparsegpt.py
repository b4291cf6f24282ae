"""SparseGPT: pruning that corrects later columns for the zeros of earlier ones."""

from typing import Literal

from jaxtyping import Array, Float

from jaxstack.compress.column_sweep import sparsegpt
from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.column_sweep_base import ColumnSweepMethod
from jaxstack.compress.methods.pruning_base import PruningMethod


class SparseGpt(ColumnSweepMethod, PruningMethod):
    """Prunes a matrix in blocks of columns, correcting later columns for each error (SparseGPT, arXiv:2301.00774)."""

    method: Literal["sparsegpt"] = "sparsegpt"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        found = sparsegpt(w, self.hessian(statistics), self.zeros, self.damping)
        self.warn_unless(found.valid, "pruned by magnitude")
        return found.w
