"""Interface of the methods that train weights in compressed form: quantized, sparse, clustered or of low rank."""

from abc import abstractmethod
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.compressed_training.compressible_weights import MatrixLayout, Weight
from jaxstack.config.base import PathRule
from pallas_kernels.weight_only.packed import PackedWeight

Stored: TypeAlias = Any
"""A weight in the train state: an array, or a dict of arrays for a weight that is stored in factors."""


class WeightRule(PathRule):
    """Base class of the methods that train weights in compressed form; each is a rule that chooses weights by path.

    A subclass has its own file, and is listed in `config.METHODS`; a configuration lists rules in `compression.rules`.

    The train state stores the float32 weight; a step computes with the result of `use`, and an export contains that of
    `export`. Most methods only implement `compress`.
    """

    one_by_one: ClassVar[bool] = False
    """True: the matrices of a stack are compressed in a loop."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Description of the method with its main settings, for reports."""

    def check(self, weight: Weight) -> None:
        """Check that the method can compress a weight.

        Raises:
          ConfigError: it cannot.
        """
        del weight

    @property
    def replaces_matmul(self) -> bool:
        """True if the rule replaces the matmul of its layers, which pipelines do not support."""
        return False

    def replace_matmul(self, layer: nnx.Module, weight: Weight) -> None:
        """Replace, in place, the matmul of the layer that holds a weight. Default: nothing is replaced.

        Raises:
          ConfigError: the layer has no matmul that can be replaced.
        """
        del layer, weight

    @abstractmethod
    def compress(self, w: Float[Array, "out in"], *, train: bool) -> Float[Array, "out in"]:
        """Compress a weight matrix, and return its values decompressed, as a dense matrix.

        If `train`, by a differentiable approximation; otherwise the values are exactly those that are exported.
        """

    def stored_parts(self, layout: MatrixLayout) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] | None:
        """Return the factors that are trained in place of a weight, name -> (shape, logical axes), or None.

        None: the train state stores the weight itself.
        """
        del layout
        return None

    def store(self, w: jax.Array, layout: MatrixLayout) -> Stored:
        """Convert an initial weight to what the train state stores: the weight itself, or factors to train."""
        del layout
        return w

    def number_of_choices(self, layout: MatrixLayout) -> int:
        """Return among how many options, such as ranks, a train step picks one at random for a matrix; 0: none."""
        del layout
        return 0

    def use(self, stored: Stored, layout: MatrixLayout, choice: Int[Array, "*stack"] | None) -> jax.Array:
        """Compute the compressed weight for a training forward pass from the stored weight or factors. Differentiable.

        Args:
          stored: what the train state holds.
          layout: the weight as matrices.
          choice: for each matrix the random integer from 0 to `choices` - 1 that the step has drawn for it; outside of
            this range if it has drawn for another matrix; None if nothing was drawn.
        """
        del choice
        return layout.map(lambda w: self.compress(w, train=True), stored, one_by_one=self.one_by_one)

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Compute the compressed weight for evaluation and export from what the train state stores."""
        return layout.map(lambda w: self.compress(w, train=False), stored, one_by_one=self.one_by_one)

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the dense float32 weight that a later compression (`jaxstack compress`) starts from."""
        del layout
        return stored

    def loss_term(self, stored: Stored, layout: MatrixLayout) -> jax.Array | None:
        """Return a penalty on the weight, such as a group lasso, that is added to the mean loss; None: no penalty."""
        del stored, layout
        return None

    def keep(self, old: Stored, new: Stored) -> Stored:
        """Return the weight after an optimizer step with the method's constraint applied, e.g. zeros that stay zero."""
        del old
        return new

    @abstractmethod
    def pack(self, stored: Stored) -> PackedWeight | Float[Array, "out in"]:
        """Convert one matrix [out, in] of the train state to the packed or pruned form that an export writes.

        Not traceable: the shapes may depend on the values.
        """

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        """Return how many numbers an export stores for a weight, for example only the nonzero ones, int32."""
        del layout
        return jnp.int32(stored.size)
