"""Fine-tuning of a pruned model: weights that are zero at the start stay zero.

No mask is stored: it is the set of zeros of the weight itself, which neither the gradient nor the optimizer's step
changes.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.compressed_training.base import Stored, WeightRule
from jaxstack.compressed_training.compressible_weights import MatrixLayout


class MaskRule(WeightRule):
    """Keeps the zeros that the weights have at the start of the run, in any pattern."""

    method: Literal["mask"] = "mask"

    @property
    def title(self) -> str:
        return "sparse"

    def compress(self, w: Float[Array, "out in"], *, train: bool) -> Float[Array, "out in"]:
        del train
        return jnp.where(w == 0, 0, w)  # the gradient of a zero is zero

    def pack(self, stored: Stored) -> Float[Array, "out in"]:
        return stored

    def keep(self, old: Stored, new: Stored) -> Stored:
        return jnp.where(old == 0, 0, new)

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        del layout
        return jnp.sum(stored != 0, dtype=jnp.int32)
