"""Pruning by magnitude: the smallest weights of each matrix become zero."""

from typing import Literal

from jaxtyping import Array, Float

from jaxstack.compress.methods.base import Compressed, InputStatistics
from jaxstack.compress.methods.pruning_base import PruningMethod
from jaxstack.compress.prune import magnitude


class Magnitude(PruningMethod):
    """Prunes the weights of smallest magnitude in each layer (arXiv:1506.02626). Needs no calibration text."""

    method: Literal["magnitude"] = "magnitude"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        return magnitude(w, self.zeros)
