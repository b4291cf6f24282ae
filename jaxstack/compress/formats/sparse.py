"""Sparse weights: a pattern of zeros, set by magnitude after training, and kept while a pruned model is trained.

A matrix with 2:4 sparsity is stored without its zeros, one with any other pattern with them. Weights are matrices
W [out, in].
"""

import dataclasses
import re
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from jaxstack.compress.base import AfterTraining, Compressed, DuringTraining, Format, Method, Stored
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.packed import pack_two_of_four


@dataclasses.dataclass(frozen=True)
class Pattern(Format):
    """Sparsity pattern: a fraction of zeros, or n:m, which keeps n of every m consecutive inputs.

    Attributes:
      sparsity: share of weights that become zero, over all weights that are compared.
      keep_of: (n, m) keeps n of every m consecutive inputs in each row, and replaces `sparsity`; 2:4 is (2, 4).
    """

    sparsity: float = 0.5
    keep_of: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, not {self.sparsity}.")
        if self.keep_of is not None and not 0 < self.keep_of[0] < self.keep_of[1]:
            raise ValueError(f"An n:m pattern keeps at least 1 and fewer than m weights, not {self}.")

    def __str__(self) -> str:
        return f"{self.sparsity:.0%}" if self.keep_of is None else "{}:{}".format(*self.keep_of)

    @property
    def share(self) -> float:
        """Fraction (0 to 1) of the weights that become zero."""
        return self.sparsity if self.keep_of is None else 1 - self.keep_of[0] / self.keep_of[1]

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        if self.keep_of is None or inputs % self.keep_of[1] == 0:
            return None
        return f"the pattern {self} needs a multiple of {self.keep_of[1]} inputs; this layer has {inputs}"

    def pack(self, w: Float[Array, "out in"]) -> Compressed:
        """Set the weights of smallest magnitude to zero (Han et al. 2015, arXiv:1506.02626); return w as stored."""
        return self.stored(self.prune(w, jnp.abs(w)))

    def stored(self, w: Float[Array, "out in"]) -> Compressed:
        """Return a matrix that has the pattern as it is stored: packed without its zeros, if the pattern is 2:4."""
        return pack_two_of_four(w) if self.keep_of == (2, 4) else w

    def prune(self, w: Float[Array, "out in"], scores: Float[Array, "out in"], *, by_row: bool = False) -> jax.Array:
        """Return w with the weights of the smallest scores set to zero; see `zeros`."""
        return jnp.where(self.zeros(scores, by_row=by_row), 0, w)

    def zeros(self, scores: Float[Array, "out in"], *, by_row: bool = False) -> Bool[Array, "out in"]:
        """Return the mask of the weights that the pattern sets to zero: those with the smallest scores.

        Of equal scores in a row or group the first are chosen. Over a whole matrix all weights that equal the largest
        chosen score are chosen too.

        Args:
          scores: importance of each weight.
          by_row: compare the weights of each row only among themselves; otherwise all of the matrix.
        """
        if self.keep_of is not None:
            kept, size = self.keep_of
            if reason := self.unsupported_reason(*scores.shape):
                raise ValueError(f"{reason}.")
            return _smallest_in_groups(scores.reshape(scores.shape[0], -1, size), size - kept).reshape(scores.shape)
        if by_row:
            order = jnp.argsort(scores, axis=1)[:, : int(scores.shape[1] * self.sparsity)]
            return jnp.put_along_axis(jnp.zeros(scores.shape, bool), order, True, axis=1, inplace=False)
        flat = scores.reshape(-1)
        count = int(flat.size * self.sparsity)
        return jnp.zeros(scores.shape, bool) if count == 0 else scores <= jnp.sort(flat)[count - 1]


def _smallest_in_groups(scores: Float[Array, "out groups m"], count: int) -> Bool[Array, "out groups m"]:
    """Return the mask of the `count` smallest scores of each group, by comparing all pairs in it."""
    own = scores[..., :, None]
    other = scores[..., None, :]
    index = jnp.arange(scores.shape[-1])
    before = (other < own) | ((other == own) & (index < index[:, None]))
    return before.sum(axis=-1) < count


@dataclasses.dataclass(frozen=True)
class KeptZeros(Format):
    """Weights in any pattern of zeros, which is left as it is."""

    def pack(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        return w

    def round_in_training(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        return jnp.where(w == 0, 0, w)  # the gradient of a zero is zero


class PruningMethod(Method):
    """Base of methods that set a fraction of a matrix's weights to zero, in a pattern or anywhere."""

    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of the weights that become zero. Ignored with a pattern."""
    pattern: str | None = None
    """`n:m` keeps n of every m consecutive inputs, such as 2:4. Default: zeros may be anywhere."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "PruningMethod":
        if self.pattern is None:
            return self
        if not re.fullmatch(r"[1-9]\d?:[1-9]\d?", self.pattern):
            raise ValueError(f"pattern {self.pattern!r} must be n:m, which keeps n of every m inputs, as in 2:4.")
        if not self._kept_of[0] < self._kept_of[1]:
            raise ValueError(f"pattern {self.pattern} keeps n of every m inputs, with n below m, such as 2:4.")
        return self

    @property
    def _kept_of(self) -> tuple[int, int]:
        """n and m of the n:m sparsity pattern; (1, 1) without one."""
        kept, size = (self.pattern or "1:1").split(":")
        return int(kept), int(size)

    @property
    def format(self) -> Pattern:
        return Pattern(self.sparsity) if self.pattern is None else Pattern(keep_of=self._kept_of)


class Magnitude(PruningMethod, AfterTraining):
    """Prunes the weights of smallest magnitude in each layer (arXiv:1506.02626). Needs no calibration text."""

    method: Literal["magnitude"] = "magnitude"


class MaskRule(DuringTraining):
    """Keeps the zeros that the weights have at the start of the run, in any pattern.

    No mask is stored: it is the set of zeros of the weight itself, which neither the gradient nor the optimizer's step
    changes.
    """

    needs_start: ClassVar[str | None] = (
        "method mask keeps the zeros of a pruned model: name its directory with run.init_from."
    )
    method: Literal["mask"] = "mask"

    @property
    def format(self) -> KeptZeros:
        return KeptZeros()

    @property
    def title(self) -> str:
        return "sparse"

    def check_start(self, path: str, w: jax.Array) -> None:
        if int(jnp.sum(w != 0)) == int(np.prod(w.shape)):
            raise ConfigError(
                f"compression.rules: {path} has no zeros that method mask could keep; start from a pruned model, or "
                "make the rule's path match pruned weights only."
            )

    def keep(self, old: Stored, new: Stored) -> Stored:
        return jnp.where(old == 0, 0, new)

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        del layout
        return jnp.sum(stored != 0, dtype=jnp.int32)
