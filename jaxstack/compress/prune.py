"""Choice of the weights to set to zero: by magnitude, by Wanda's score, unstructured or n of every m inputs.

Weights are matrices W [out, in].
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@dataclasses.dataclass(frozen=True)
class Pattern:
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

    def check(self, inputs: int) -> None:
        """Check that a row of `inputs` weights can be cut into the groups of an n:m pattern.

        Raises:
          ValueError: they do not.
        """
        if self.keep_of is not None and inputs % self.keep_of[1]:
            raise ValueError(f"A {self} pattern needs a multiple of {self.keep_of[1]} inputs; this layer has {inputs}.")

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
            self.check(scores.shape[1])
            return _smallest_in_groups(scores.reshape(scores.shape[0], -1, size), size - kept).reshape(scores.shape)
        if by_row:
            order = jnp.argsort(scores, axis=1)[:, : int(scores.shape[1] * self.sparsity)]
            return jnp.put_along_axis(jnp.zeros(scores.shape, bool), order, True, axis=1, inplace=False)
        flat = scores.reshape(-1)
        count = int(flat.size * self.sparsity)
        return jnp.zeros(scores.shape, bool) if count == 0 else scores <= jnp.sort(flat)[count - 1]


def magnitude(w: Float[Array, "out in"], pattern: Pattern) -> Float[Array, "out in"]:
    """Return w with the weights of smallest magnitude set to zero (Han et al. 2015, arXiv:1506.02626)."""
    return jnp.where(pattern.zeros(jnp.abs(w)), 0, w)


def wanda(w: Float[Array, "out in"], square_sum: Float[Array, " in"], pattern: Pattern) -> Float[Array, "out in"]:
    """Return w with zeros where |w| * |x|_2 is smallest in its row (Wanda; Sun et al. 2023, arXiv:2306.11695).

    Args:
      w: weights.
      square_sum: sum of x^2 of each input over the calibration tokens.
      pattern: share of zeros in each row, or n:m.
    """
    return jnp.where(pattern.zeros(jnp.abs(w) * jnp.sqrt(square_sum), by_row=True), 0, w)


def _smallest_in_groups(scores: Float[Array, "out groups m"], count: int) -> Bool[Array, "out groups m"]:
    """Return the mask of the `count` smallest scores of each group, by comparing all pairs in it."""
    own = scores[..., :, None]
    other = scores[..., None, :]
    index = jnp.arange(scores.shape[-1])
    before = (other < own) | ((other == own) & (index < index[:, None]))
    return before.sum(axis=-1) < count
