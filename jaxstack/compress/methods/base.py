"""Base class of compression methods, which turn the weight of a dense layer into a packed or a pruned one."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import jax
from jaxtyping import Array, Float

from jaxstack.compress.input_scales import Sublayer
from jaxstack.config.base import PathRule
from jaxstack.models.config import ModelConfig
from pallas_kernels.weight_only.packed import PackedWeight

Statistic: TypeAlias = Literal["hessian", "mean_abs", "square_sum"]
"""A field of `InputStatistics`."""

Compressed: TypeAlias = PackedWeight | Float[Array, "out in"]
"""A packed matrix, or a dense one that was pruned, which is stored as plain numbers."""


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
      statistics: statistics of the inputs of each dense layer, by the path of its kernel.
      methods: the method chosen for each dense layer, by the path of its kernel.
      output_errors: (sublayer, change, candidates [n, ...]) -> mean squared change of the sublayer's output over the
        calibration text for each candidate, [n].
    """

    config: ModelConfig
    weights: Mapping[str, jax.Array]
    statistics: Mapping[str, InputStatistics]
    methods: "Mapping[str, Method]"
    output_errors: Callable[[Sublayer, Change, Float[Array, "n ..."]], Float[Array, " n"]]


class Method(PathRule):
    """Base class of compression methods. Each is also a rule of a recipe; its `path` selects the dense layers.

    A subclass has its own file with a field `method: Literal["name"] = "name"`, its settings as further fields, and
    `compress`; it is listed in `jaxstack.compress.methods.METHODS`. Paths are those of an unrolled model, such as
    `decoder/layers/3/mlp/down_proj/kernel`; the first rule of the recipe that matches holds.
    """

    needs: ClassVar[frozenset[Statistic]] = frozenset()
    """Statistics of the layer's inputs that `compress` reads; without any the method needs no calibration text."""

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        """Return why the method cannot compress a matrix [out, in], and a remedy; None if it can."""
        del outputs, inputs
        return None

    def rescaled_weights(self, block: CalibrationBlock) -> Mapping[str, jax.Array]:
        """Return rescaled weights by path, to replace those of a Transformer layer before its matrices are compressed.

        Called once for each distinct method in the layer if `needs` is not empty. The replaced weights must compute
        the same function together, such as a scale moved from a kernel into the norm before it.
        """
        del block
        return {}

    @abstractmethod
    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        """Return a dense layer's matrix packed or pruned, using statistics of its inputs if the method needs any.

        Args:
          w: weights of the layer, float32.
          statistics: statistics of its inputs, with the fields that `needs` names; None if it names none.

        Warns:
          UserWarning: the method could not do what it was asked to, such as a Hessian that is not positive definite; a
            report of the compression names the layer beside it.
        """


class Keep(Method):
    """Leaves the layers that `path` matches uncompressed; no later rule applies to them."""

    method: Literal["keep"] = "keep"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        return w
