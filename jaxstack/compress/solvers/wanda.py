"""Wanda: pruning by the magnitude of a weight times the norm of its input (Sun et al. 2023, arXiv:2306.11695)."""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.compress.base import AfterTraining, Compressed, InputStatistics, Statistic
from jaxstack.compress.formats.sparse import Pattern, PruningMethod


class Wanda(PruningMethod, AfterTraining):
    """Prunes in each row the weights with the smallest |w| times the norm of their input (Wanda, arXiv:2306.11695)."""

    needs: ClassVar[frozenset[Statistic]] = frozenset({"square_sum"})
    method: Literal["wanda"] = "wanda"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        assert statistics is not None and statistics.square_sum is not None
        return self.format.stored(wanda(w, statistics.square_sum, self.format))


def wanda(w: Float[Array, "out in"], square_sum: Float[Array, " in"], pattern: Pattern) -> Float[Array, "out in"]:
    """Return w with zeros where |w| * |x|_2 is smallest in its row.

    Args:
      w: weights.
      square_sum: sum of x^2 of each input over the calibration tokens.
      pattern: share of zeros in each row, or n:m.
    """
    return pattern.prune(w, jnp.abs(w) * jnp.sqrt(square_sum), by_row=True)
