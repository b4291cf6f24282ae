"""Wanda: pruning by the magnitude of a weight times the norm of its input."""

from typing import ClassVar, Literal

from jaxtyping import Array, Float

from jaxstack.compress.methods.base import Compressed, InputStatistics, Statistic
from jaxstack.compress.methods.pruning_base import PruningMethod
from jaxstack.compress.prune import wanda


class Wanda(PruningMethod):
    """Prunes in each row the weights with the smallest |w| times the norm of their input (Wanda, arXiv:2306.11695)."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"square_sum"})
    method: Literal["wanda"] = "wanda"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        assert statistics is not None and statistics.square_sum is not None
        return wanda(w, statistics.square_sum, self.zeros)
