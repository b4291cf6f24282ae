"""Truncated singular value decomposition: a matrix as the product of two thin ones."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jaxstack.compress.methods.base import Compressed, InputStatistics, Method
from pallas_kernels.weight_only.packed import pack_low_rank


class LowRank(Method):
    """Replaces W by U V of the given rank, the nearest such product (Eckart & Young 1936). Needs no calibration text.

    The square root of each singular value goes to either side, so that both factors have the same norm.
    """

    method: Literal["lowrank"] = "lowrank"
    rank: int | None = Field(default=None, ge=1)
    """Rank of the product. Default: the largest that keeps `ratio` of the weights."""
    ratio: float | None = Field(default=None, gt=0, lt=1)
    """Numbers in both factors divided by the weights of the layer. Default: 0.5, unless `rank` is given."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the factors."""

    @model_validator(mode="after")
    def _check_one(self) -> "LowRank":
        if self.rank is not None and self.ratio is not None:
            raise ValueError(f"rank ({self.rank}) and ratio ({self.ratio}) exclude each other; leave one out.")
        return self

    def rank_of(self, outputs: int, inputs: int) -> int:
        """Return the rank to reduce a matrix [out, in] to; 0 if even rank 1 exceeds the size that `ratio` allows."""
        if self.rank is not None:
            return self.rank
        return int((self.ratio or 0.5) * outputs * inputs / (outputs + inputs))

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        rank = self.rank_of(outputs, inputs)
        most = (outputs * inputs - 1) // (outputs + inputs)
        if rank < 1:
            return f"ratio {self.ratio} leaves no rank of {outputs} x {inputs} weights; take a larger one"
        if rank > most:
            return f"rank {rank} makes {outputs} x {inputs} weights no smaller; take at most {most}"
        return None

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        u, v = truncated_svd(w, self.rank_of(*w.shape))
        return pack_low_rank(u.astype(self.dtype), v.astype(self.dtype))


def truncated_svd(w: Float[Array, "out in"], rank: int) -> tuple[Float[Array, "out rank"], Float[Array, "rank in"]]:
    """Return the float32 factors u, v of the nearest matrix of this rank, with u^T u = v v^T diagonal."""
    u, s, vt = jnp.linalg.svd(w.astype(jnp.float32), full_matrices=False)
    root = jnp.sqrt(s[:rank])
    return u[:, :rank] * root, root[:, None] * vt[:rank]
