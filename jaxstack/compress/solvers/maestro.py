"""Trains weights as low-rank products U V: random truncation orders the ranks by importance; useless ones drop out.

Maestro (Horvath et al. 2023, arXiv:2308.14929): the factors begin as the singular value decomposition of the weight,
with the square root of the singular values in each. A train step draws one pair (layer, rank b) uniformly, and that
layer computes with its first b ranks alone; all others compute with all of theirs. A group lasso over the tails of the
factors lets ranks that do not help fade; those whose norms have a product below a threshold are set to zero for good.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from jaxstack.compress.base import DuringTraining, Stored, training_feature
from jaxstack.compress.formats.low_rank import TruncatedProduct, split_by_svd
from jaxstack.compress.matrix import MatrixLayout, Weight
from jaxstack.config.features import Excludes, Feature
from jaxstack.errors import ConfigError
from pallas_kernels.weight_only.packed import PackedWeight, pack_low_rank


class LowRankRule(DuringTraining):
    """Trains each matrix as the product of two factors, and finds the rank that it needs."""

    features: ClassVar[tuple[Feature, ...]] = (
        training_feature(
            "low-rank weights",
            "low_rank",
            "rank: 4",
            excludes=(
                Excludes(
                    "muP",
                    "the rank of the factors does not grow with the width",
                    "model.parametrization mup has no rule for the factors of method low_rank; set it to standard.",
                ),
            ),
        ),
    )
    method: Literal["low_rank"] = "low_rank"
    rank: int | None = Field(default=None, ge=1)
    """Largest rank; null: the smaller dim of the matrix."""
    penalty: float = Field(default=5e-3, ge=0)
    """Weight of the group lasso, added to the mean loss."""
    threshold: float = Field(default=1e-5, ge=0)
    """Ranks whose two norms have a smaller product are set to zero."""

    @property
    def title(self) -> str:
        return "low rank"

    def check(self, weight: Weight) -> None:
        largest = min(weight.layout.size)
        if self.rank is not None and self.rank > largest:
            raise ConfigError(
                f"compression.rules: rank {self.rank} is more than {weight.names[0]} can have ({largest}); choose at "
                f"most {largest}, or null for the largest."
            )

    @property
    def format(self) -> TruncatedProduct:
        return TruncatedProduct(self.rank)

    def stored_parts(self, layout: MatrixLayout) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
        outputs, inputs = layout.size
        stack = layout.stack_shape
        rank = self.format.rank_of(outputs, inputs)
        stacked, of_outputs, of_inputs = layout.matrix_axes
        return {
            "u": ((*stack, outputs, rank), (*stacked, of_outputs, "rank")),
            "v": ((*stack, rank, inputs), (*stacked, "rank", of_inputs)),
        }

    def store(self, w: jax.Array, layout: MatrixLayout) -> Stored:
        u, v = split_by_svd(layout.to_matrices(w), self.format.rank_of(*layout.size))
        return {"u": u, "v": v}

    def number_of_choices(self, layout: MatrixLayout) -> int:
        return self.format.rank_of(*layout.size)

    def use(self, stored: Stored, layout: MatrixLayout, choice: Int[Array, "*stack"] | None) -> jax.Array:
        u = stored["u"]
        v = stored["v"]
        if choice is not None:
            u = u * leading_rank_mask(choice, u.shape[-1])[..., None, :]
        return layout.from_matrices(_multiply(u, v))

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        return self.use(stored, layout, None)

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        return self.use(stored, layout, None)

    def loss_term(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        del layout
        return self._group_lasso(stored["u"]) + self._group_lasso(jnp.swapaxes(stored["v"], -1, -2))

    def _group_lasso(self, factor: jax.Array) -> jax.Array:
        """Return the group lasso of a factor [*stack, n, rank]: penalty * sum over b of the norms of [..., b:]."""
        squares = jnp.sum(jnp.square(factor), axis=-2)
        tails = jnp.flip(jnp.cumsum(jnp.flip(squares, -1), axis=-1), -1)
        alive = tails > 0
        norms = jnp.where(alive, jnp.sqrt(jnp.where(alive, tails, 1.0)), 0.0)  # sqrt has no gradient at zero
        return self.penalty * jnp.sum(norms)

    def keep(self, old: Stored, new: Stored) -> Stored:
        alive = (_products(old) > 0) & (_products(new) >= self.threshold)
        return {"u": new["u"] * alive[..., None, :], "v": new["v"] * alive[..., :, None]}

    def pack(self, stored: Stored) -> PackedWeight:
        return pack_low_rank(*trim(stored["u"], stored["v"]))

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        return jnp.sum(_products(stored) > 0, dtype=jnp.int32) * sum(layout.size)


def leading_rank_mask(choice: Int[Array, "*stack"], rank: int) -> Float[Array, "*stack rank"]:
    """Return the 0/1 mask [*stack, rank] that truncates the matrices of a stack to their first `choice` + 1 ranks.

    Args:
      choice: for each matrix; one outside of 0 to rank - 1 masks nothing.
      rank: number of ranks of each matrix.
    """
    choice = choice[..., None]
    whole = (choice < 0) | (choice >= rank)
    return (whole | (jnp.arange(rank) <= choice)).astype(jnp.float32)


def trim(
    u: Float[Array, "out rank"], v: Float[Array, "rank in"]
) -> tuple[Float[Array, "out kept"], Float[Array, "kept in"]]:
    """Drop the ranks whose factors are zero. Not traceable, as the output shapes depend on the values."""
    alive = _products({"u": u, "v": v}) > 0
    return u[:, alive], v[alive]


def _products(stored: Stored) -> jax.Array:
    """Return for each rank the norm of its column of U times that of its row of V, [*stack, rank]."""
    u = stored["u"]
    v = stored["v"]
    return jnp.linalg.norm(u, axis=-2) * jnp.linalg.norm(v, axis=-1)


def _multiply(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST)
