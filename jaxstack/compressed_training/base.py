"""The interface of a method of compressed training."""

from abc import abstractmethod
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.compressed_training.compressible_weights import MatrixLayout, Weight
from jaxstack.config.base import PathRule
from pallas_kernels.weight_only.packed import PackedWeight

Stored: TypeAlias = Any
"""A weight in the train state: an array, or a dict of arrays for a weight that is stored in factors."""


class WeightRule(PathRule):
    """Base of the rules of `compression.rules`. A subclass has its own file, and is listed in `config.METHODS`.

    The train state stores the float32 weight; a step computes with the result of `use`, and an export contains that of
    `export`. Most methods only implement `compress`.
    """

    one_by_one: ClassVar[bool] = False
    """True: the matrices of a stack are compressed in a loop."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The method with its main settings, for reports."""

    def check(self, weight: Weight) -> None:
        """Check that the method can compress a weight.

        Raises:
          ConfigError: it cannot.
        """
        del weight

    @abstractmethod
    def compress(self, w: Float[Array, "out in"], *, train: bool) -> Float[Array, "out in"]:
        """Return the compressed matrix; differentiable if `train`, the exported values if not."""

    def stored_parts(self, layout: MatrixLayout) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] | None:
        """Return name -> (shape, logical axes) of the factors that the train state stores; None: the weight itself."""
        del layout
        return None

    def store(self, w: jax.Array, layout: MatrixLayout) -> Stored:
        """Return the initial train-state form of a weight: the weight itself, or the factors that are trained."""
        del layout
        return w

    def choices(self, layout: MatrixLayout) -> int:
        """Return the number of values of the random `choice` that `use` takes; 0: `use` is not random."""
        del layout
        return 0

    def use(self, stored: Stored, layout: MatrixLayout, choice: Int[Array, ""] | None) -> jax.Array:
        """Return the weight that a train step computes with. Differentiable.

        Args:
          stored: what the train state holds.
          layout: the weight as matrices.
          choice: random integer from 0 to `choices` - 1; outside of this range if the step has drawn for another
            weight; None if nothing was drawn.
        """
        del choice
        return layout.map(lambda w: self.compress(w, train=True), stored, one_by_one=self.one_by_one)

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the compressed weight that evaluation and export use."""
        return layout.map(lambda w: self.compress(w, train=False), stored, one_by_one=self.one_by_one)

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the float32 weight from which compression after training starts: as the optimizer stores it."""
        del layout
        return stored

    def loss_term(self, stored: Stored, layout: MatrixLayout) -> jax.Array | None:
        """Return a scalar that is added to the mean loss; None: nothing."""
        del stored, layout
        return None

    def keep(self, old: Stored, new: Stored) -> Stored:
        """Return `new`, the stored values after an optimizer step, with the method's constraint applied."""
        del old
        return new

    @abstractmethod
    def pack(self, stored: Stored) -> PackedWeight | Float[Array, "out in"]:
        """Return one matrix [out, in] in the form that an export writes, given its values in the train state.

        Not traceable: the shapes may depend on the values.
        """

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        """Return the number of values that an export has to store, int32."""
        del layout
        return jnp.int32(stored.size)
