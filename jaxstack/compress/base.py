"""Interfaces of compression: a format of weight matrices, and the methods that use it after and during training.

A `Format` says how a matrix [out, in] is rounded and packed. A `Method` is a rule that chooses weights by path and
gives them a format: `AfterTraining` for recipes of `jaxstack compress`, `DuringTraining` for `compression.rules`. With
the nearest values of the format a method is complete; a solver overrides what it does otherwise.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.compress.matrix import MatrixLayout, Weight
from jaxstack.config.base import PathRule
from jaxstack.config.features import Excludes, Feature
from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from pallas_kernels.weight_only.packed import PackedWeight, stack_packed

Compressed: TypeAlias = PackedWeight | Float[Array, "out in"]
"""A packed matrix, or a dense one with zeros in a pattern other than 2:4."""
Stored: TypeAlias = Any
"""A weight in the train state: an array, or a dict of arrays for a weight that is stored in factors."""
Statistic: TypeAlias = Literal["hessian", "mean_abs", "square_sum"]
"""A field of `InputStatistics`."""
Sublayer: TypeAlias = Literal["attention", "mlp"]
"""A sublayer of a Transformer layer, whose output is added to the residual stream."""


class Format(ABC):
    """A format in which weight matrices are stored, and the rounding to it. Subclasses are frozen dataclasses.

    A subclass with `pack` is complete. Rounding, and its differentiable form for training, follow from it.
    """

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        """Return why a matrix [out, in] cannot have this format, and a remedy; None if it can."""
        del outputs, inputs
        return None

    @abstractmethod
    def pack(self, w: Float[Array, "out in"]) -> Compressed:
        """Return a matrix in this format, rounded to the nearest values; with zeros that are not 2:4 it is dense."""

    def round(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the values that `pack` stores, dense and float32."""
        return dense_matrix(self.pack(w))

    def round_in_training(self, w: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the matrix that a train step computes with, differentiable; by default straight through `round`."""
        return straight_through(w, self.round(jax.lax.stop_gradient(w)))


def dense_matrix(compressed: Compressed) -> Float[Array, "out in"]:
    """Return the values of a packed or pruned matrix as a dense one."""
    return compressed.matrix() if isinstance(compressed, PackedWeight) else compressed


def straight_through(w: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return `rounded` with the gradient of w (straight-through estimator, Bengio et al. 2013, arXiv:1308.3432)."""
    fixed = jax.lax.stop_gradient(w)
    return jax.lax.stop_gradient(rounded) + (w - fixed)  # the difference is exactly zero


class Method(PathRule):
    """Base class of compression methods: a rule that chooses weights by path, and the format that it gives them.

    A subclass has a field `method: Literal["name"] = "name"` and its settings as further fields. Paths are those of an
    unrolled model, such as `decoder/layers/3/mlp/down_proj/kernel`.
    """

    @property
    @abstractmethod
    def format(self) -> Format:
        """The format of the weights."""

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        """Return why the method cannot compress a matrix [out, in], and a remedy; None if it can."""
        return self.format.unsupported_reason(outputs, inputs)


def method_name(method: PathRule) -> str:
    """Return the name by which recipes and configurations choose a compression method, such as `gptq`."""
    return str(type(method).model_fields["method"].default)


@dataclasses.dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs x of a dense layer over the calibration text, float32.

    Attributes:
      count: number of inputs (tokens).
      hessian: (2 / count) sum of x x^T, [in, in]; None unless a method asks for it.
      mean_abs: mean of |x|, [in]; None unless a method asks for it.
      square_sum: sum of x^2, [in]; None unless a method asks for it.
    """

    count: int
    hessian: Float[Array, "in in"] | None = None
    mean_abs: Float[Array, " in"] | None = None
    square_sum: Float[Array, " in"] | None = None


LayerStatistics: TypeAlias = InputStatistics | tuple[InputStatistics, ...]
"""Statistics of the inputs of a dense layer, or of each of a layer's experts."""


class Change(Protocol):
    """Interface of a hashable function that returns replacements for some weights of a Transformer layer."""

    def __call__(self, weights: Mapping[str, jax.Array], candidate: Any) -> Mapping[str, jax.Array]:
        """Return replacements for some of the layer's weights, by path, computed from one candidate, e.g. input scales.

        Args:
          weights: `CalibrationBlock.weights`.
          candidate: arrays that the change depends on.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CalibrationBlock:
    """A Transformer layer's weights and input statistics, for methods that change several of its weights together.

    Attributes:
      config: configuration of the model.
      weights: the layer's parameters by path, such as `mlp/up_proj/kernel` [*in, *out] and `mlp_norm/scale`, float32.
      layouts: the kernels of dense layers and experts as matrices, by path.
      statistics: statistics of the inputs of each dense layer and of each expert, by the path of the kernel.
      methods: the method chosen for each dense layer and projection of experts, by the path of its kernel.
      output_errors: (sublayer, change, candidates [n, ...]) -> mean squared change of the sublayer's output over the
        calibration text for each candidate, [n].
    """

    config: ModelConfig
    weights: Mapping[str, jax.Array]
    layouts: Mapping[str, MatrixLayout]
    statistics: Mapping[str, LayerStatistics]
    methods: "Mapping[str, AfterTraining]"
    output_errors: Callable[[Sublayer, Change, Float[Array, "n ..."]], Float[Array, " n"]]


class AfterTraining(Method):
    """Base class of the methods of recipes, which compress the weights of a trained model.

    By default weights are rounded to the nearest values of the format, without calibration text.
    """

    needs: ClassVar[frozenset[Statistic]] = frozenset()
    """Statistics of the layer's inputs that `compress` reads; without any the method needs no calibration text."""

    @property
    def rounds_inputs(self) -> bool:
        """True if dense layers that the method compresses round their inputs as well."""
        return False

    def rescaled_weights(self, block: CalibrationBlock) -> Mapping[str, jax.Array]:
        """Return rescaled weights by path, to replace those of a Transformer layer before its matrices are compressed.

        Called once for each distinct method in the layer if `needs` is not empty. The replaced weights must compute
        the same function together, such as a scale moved from a kernel into the norm before it.
        """
        del block
        return {}

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        """Return the matrix of a dense layer or an expert packed or pruned, using statistics if the method needs any.

        Args:
          w: weights of the layer, float32.
          statistics: statistics of its inputs, with the fields that `needs` names; None if it names none.

        Warns:
          UserWarning: the method could not do what it was asked to, such as a Hessian that is not positive definite; a
            report of the compression names the layer.
        """
        del statistics
        return self.format.pack(w)


def stack_compressed(matrices: Sequence[Compressed]) -> PackedWeight | Float[Array, "n out in"]:
    """Stack matrices that one method has compressed, such as those of a layer's experts, along a new first dim.

    Those with 2:4 sparsity become plain arrays, zeros included, as no kernel multiplies with a stack of them.
    """
    first = matrices[0]
    if isinstance(first, PackedWeight) and first.format.numbers is None:
        stacked = stack_packed([cast(PackedWeight, matrix) for matrix in matrices])
        assert stacked is not None, "a method packs all matrices of a shape alike"
        return stacked
    return jnp.stack([dense_matrix(matrix) for matrix in matrices])


def compress_weight(w: jax.Array, method: AfterTraining, layout: MatrixLayout) -> PackedWeight | jax.Array:
    """Compress a weight by a method that needs no calibration; with zeros that are not 2:4 it stays a plain array.

    Args:
      w: the weight, in any floating-point dtype.
      method: the method.
      layout: the weight as matrices.
    """
    matrices = layout.to_matrices(w.astype(jnp.float32))
    if not layout.stack:
        return layout.from_compressed(method.compress(matrices, None))
    return layout.from_compressed(stack_compressed([method.compress(matrix, None) for matrix in matrices]))


class DuringTraining(Method):
    """Base class of the methods of `compression.rules`, which train weights in compressed form.

    The train state stores the float32 weight; a step computes with the result of `use`, and an export contains that of
    `export`. By default these are `Format.round_in_training` and `Format.round`.
    """

    one_by_one: ClassVar[bool] = False
    """True: the matrices of a stack are compressed in a loop."""
    needs_start: ClassVar[str | None] = None
    """Message that a run with this method must start from a trained model, with the reason; None: it need not."""
    features: ClassVar[tuple[Feature, ...]] = ()
    """Features of a run that the method is, for the table of what works together."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Description of the method with its main settings, for reports."""

    @property
    def after_training(self) -> AfterTraining | None:
        """The recipe's method that keeps the values of a weight trained by this one; None: none is known."""
        return self if isinstance(self, AfterTraining) else None

    def check(self, weight: Weight) -> None:
        """Check that the method can compress a weight.

        Raises:
          ConfigError: it cannot.
        """
        if reason := self.unsupported_reason(*weight.layout.size):
            raise ConfigError(f"compression.rules: {weight.names[0]}: {reason}.")

    def check_start(self, path: str, w: jax.Array) -> None:
        """Check the weight that training starts from.

        Raises:
          ConfigError: the method cannot be used with it.
        """
        del path, w

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
        return layout.map(self.format.round_in_training, stored, one_by_one=self.one_by_one)

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Compute the compressed weight for evaluation and export from what the train state stores."""
        return layout.map(self.format.round, stored, one_by_one=self.one_by_one)

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

    def pack(self, stored: Stored) -> Compressed:
        """Convert one matrix [out, in] of the train state to the packed or pruned form that an export writes.

        Not traceable: the shapes may depend on the values.
        """
        return self.format.pack(stored)

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        """Return how many numbers an export stores for a weight, for example only the nonzero ones, int32."""
        del layout
        return jnp.int32(stored.size)


def training_feature(name: str, method: str, *settings: str, excludes: tuple[Excludes, ...] = ()) -> Feature:
    """Return the feature of a run that trains weights by a method.

    Args:
      name: its name in the table of features.
      method: name of the method.
      settings: settings of a rule, such as `group_size: 8`, with which it works in a small model.
      excludes: features that it cannot be combined with.
    """
    example = ", ".join(("path: mlp", f"method: {method}", *settings))
    return Feature(
        name,
        "compression",
        lambda compression: any(method_name(rule) == method for rule in compression.rules),
        (f"compression.rules=[{{{example}}}]",),
        excludes,
        also=("compressed weights",),
    )
