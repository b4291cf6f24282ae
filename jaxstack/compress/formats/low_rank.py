"""Low rank: a matrix as the product of two thin ones, by truncated singular value decomposition."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from jaxstack.compress.base import AfterTraining, Format
from pallas_kernels.weight_only.packed import PackedWeight, pack_low_rank


@dataclasses.dataclass(frozen=True)
class TruncatedProduct(Format):
    """The product U V of the given rank that is nearest to a matrix (Eckart & Young 1936).

    Attributes:
      rank: rank of the product; None: the largest that keeps `ratio` of the weights.
      ratio: numbers in both factors divided by the weights of the matrix; None: all ranks are kept.
      dtype: dtype of the factors.
    """

    rank: int | None = None
    ratio: float | None = None
    dtype: str = "float32"

    def rank_of(self, outputs: int, inputs: int) -> int:
        """Return the rank to reduce a matrix [out, in] to; 0 if even rank 1 exceeds the size that `ratio` allows."""
        if self.rank is not None:
            return self.rank
        if self.ratio is None:
            return min(outputs, inputs)
        return int(self.ratio * outputs * inputs / (outputs + inputs))

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        rank = self.rank_of(outputs, inputs)
        most = (outputs * inputs - 1) // (outputs + inputs)
        if rank < 1:
            return f"ratio {self.ratio} leaves no rank of {outputs} x {inputs} weights; take a larger one"
        if rank > most:
            return f"rank {rank} makes {outputs} x {inputs} weights no smaller; take at most {most}"
        return None

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        u, v = split_by_svd(w, self.rank_of(*w.shape))
        return pack_low_rank(u.astype(self.dtype), v.astype(self.dtype))


def split_by_svd(
    w: Float[Array, "*stack out in"], rank: int
) -> tuple[Float[Array, "*stack out rank"], Float[Array, "*stack rank in"]]:
    """Return float32 factors (U, V) of the nearest matrix of this rank, with the root of the singular values in each.

    The two factors then have the same norm, and U^T U = V V^T is diagonal.
    """
    u, s, v = jnp.linalg.svd(w.astype(jnp.float32), full_matrices=False)
    root = jnp.sqrt(s[..., :rank])
    return u[..., :rank] * root[..., None, :], root[..., :, None] * v[..., :rank, :]


class LowRank(AfterTraining):
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

    @property
    def format(self) -> TruncatedProduct:
        return TruncatedProduct(self.rank, self.ratio or 0.5, self.dtype)

    def rank_of(self, outputs: int, inputs: int) -> int:
        """Return the rank to reduce a matrix [out, in] to; 0 if even rank 1 exceeds the size that `ratio` allows."""
        return self.format.rank_of(outputs, inputs)
