"""Base classes of optimizer configurations: shared settings, what to implement, and which dims form a matrix."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.config.base import Component, PathRule
from jaxstack.errors import ConfigError
from jaxstack.models.initialization import Role
from jaxstack.parameter_paths import check_patterns, map_by_path, match

_VECTORS = ("scale", "bias", "magnitude", "sinks", "taps", "a_log", "dt_bias", "skip")


class HasShape(Protocol):
    """Protocol of objects with an array shape, such as an array or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dim of the array."""
        ...


def is_matrix(path: str, leaf: HasShape) -> bool:
    """Return True if a parameter counts as a matrix, to which weight decay applies by default.

    Scales, biases, magnitudes, attention sinks, and what a recurrent mixer has beside its projections, count as vectors
    even if they have two dims, as those of a stack of layers do.
    """
    return len(leaf.shape) > 1 and path.rsplit("/", 1)[-1] not in _VECTORS


ADAM_WIDTH_POWERS: Mapping[Role, float] = {"input": 0.0, "hidden": -1.0, "output": -1.0, "final_gain": -1.0}
"""muP of an optimizer whose updates do not depend on the size of gradients (arXiv:2203.03466, table 3)."""


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Properties of a training run that an optimizer may use: learning rate, number of steps, parameter sharding."""

    learning_rate: Callable[[jax.typing.ArrayLike], jax.Array] = lambda step: jnp.asarray(1.0)
    """Step -> scheduled learning rate."""
    total_steps: int | None = None
    """Number of steps of the run; None: not known."""
    specs: dict[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    """Path of a trained parameter -> the PartitionSpec in which it is stored; empty: on one device."""


@dataclasses.dataclass(frozen=True)
class SampledGradient:
    """A second gradient, with labels sampled from the model, that a train step computes for its optimizer.

    The optimizer's `update` takes the estimate made of it under the keyword `name`, and the flag `renewed`, which is
    False, with zeros for the estimate, in steps between two estimates.
    """

    name: str
    """Keyword of `update`."""
    every: int
    """Steps between two estimates."""
    estimate: Callable[[PyTree, jax.Array], PyTree]
    """(gradients summed over the sampled labels, number of labels) -> estimate."""


class StepOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax optimizer that may also choose where gradients are evaluated, and ask a step for a second gradient."""

    gradient_point: Callable[[PyTree, optax.OptState], PyTree] | None = None
    """(trained parameters, state) -> where the step evaluates the gradient; None: at the parameters."""
    sampled_gradient: SampledGradient | None = None
    """The second gradient that each `update` needs; None: none."""


class GroupRule(PathRule):
    """Configuration of the parameters whose path matches: learning-rate factor, weight decay, frozen or not."""

    learning_rate_scale: float = Field(default=1.0, ge=0)
    """Factor of the scheduled learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Replaces the optimizer's weight decay. Default: the optimizer's, which does not apply to vectors."""
    frozen: bool | None = None
    """True: the parameters are never updated, and have neither gradients nor optimizer state. Default: a layer's own
    parameters are frozen in a model with adapters; nothing is frozen in a model without."""


class Optimizer(Component):
    """Base class of optimizer configurations; a subclass has its own file, `name` and `core`, listed in `OPTIMIZERS`.

    The chain around `core` is the same for all: clip by global norm, core, decoupled weight decay, learning rate.
    """

    width_powers: ClassVar[Mapping[Role, float] | None] = None
    """Role of a parameter -> p of the factor (width / base width)^p of its learning rate in muP; None: not known."""
    scales_with_gradient: ClassVar[bool] = False
    """True if gradients that are twice as large make updates twice as large, as in SGD."""
    averages_parameters: ClassVar[bool] = False
    """True if the trained parameters are averages over steps, so that the learning rate needs no decay."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak of the schedule."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (Loshchilov & Hutter 2019), on matrices only unless a group says otherwise."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global norm of the gradients, which are scaled down to it; null: no clipping."""
    balance_rate: float = Field(default=1e-3, ge=0)
    """Step size of the balance bias of each expert whose load is above or below average (`model.moe.balance_bias`)."""
    groups: tuple[GroupRule, ...] = ()
    """Rules by parameter path; the first one that matches holds."""

    def check(self, params: PyTree) -> None:
        """Check that the optimizer's rules by parameter path fit the model's parameters.

        Args:
          params: the parameters or their shapes.

        Raises:
          ConfigError: the path of a rule matches no parameter.
        """
        check_patterns([group.path for group in self.groups], params, "optimizer.groups")

    @abstractmethod
    def core(self, run: RunInfo) -> optax.GradientTransformation:
        """Return the Optax transformation from gradients to update direction, before weight decay and learning rate.

        State is sharded as its parameter, dim by dim (`jaxstack.parallel.rules.state_spec`).

        Args:
          run: learning rate, length and layout of the run.
        """

    def wrap(self, chain: optax.GradientTransformation, run: RunInfo) -> optax.GradientTransformation:
        """Wrap the complete optimizer (clipping, core, weight decay, learning rate); by default unchanged."""
        return chain

    def gradient_point(self, params: PyTree, state: optax.OptState) -> PyTree:
        """Return the parameters at which a train step evaluates the gradient; by default the current ones.

        Args:
          params: the trained parameters.
          state: the state of the optimizer that `build_optimizer` made.
        """
        return params

    @property
    def sampled_gradient(self) -> SampledGradient | None:
        """The second gradient, with sampled labels, that the optimizer needs; None by default."""
        return None

    def finish(self, update: jax.Array, param: jax.Array) -> jax.Array:
        """Transform a parameter's whole update direction at the end, for example scale it by a norm.

        By default it is returned unchanged. Layers that are stacked in one array are passed one at a time.

        Args:
          update: direction from `core`, with the parameter's shape.
          param: the parameter.

        Returns:
          The new direction.
        """
        return update


class MatrixShapeRule(PathRule):
    """Rule for parameters whose path matches a pattern: how many of their last dims form the two sides of a matrix."""

    inputs: int = Field(default=1, ge=1)
    """Number of dims, before the output dims, that are summed over."""
    outputs: int = Field(default=1, ge=1)
    """Number of last dims that form the other side of the matrix."""
    adamw: bool = False
    """Update these parameters by AdamW, as vectors are."""


KNOWN = (
    MatrixShapeRule(path=r"(^|/)(\w*embed\w*|\w*head)(/|$)", adamw=True),
    MatrixShapeRule(
        path=r"(^|/)(([qkvzxbc]|q_b|kv_b|f_b|g_b)_proj|in_proj_[qkvz]|attention/gate_proj)/(kernel|adapter/b)$",
        outputs=2,
    ),
    MatrixShapeRule(path=r"(^|/)(o|out)_proj/(kernel|adapter/a)$", inputs=2),
    MatrixShapeRule(path=".*"),
)
"""Rules that follow those of the configuration. All heads of a mixer's projection are one side of one matrix."""


class MatrixOptimizer(Optimizer):
    """Base of optimizers for the matrices of hidden layers; AdamW updates embeddings, output head and vectors."""

    matrix_width_power: ClassVar[float] = -1.0
    """Exponent of the width in muP's learning rate of matrices; `width_powers` has those of AdamW's parameters."""

    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    matrices: tuple[MatrixShapeRule, ...] = ()

    @abstractmethod
    def matrix_core(self, run: RunInfo) -> optax.GradientTransformation:
        """Return the Optax transformation that updates the matrix parameters; AdamW updates all others."""

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        adamw = optax.scale_by_adam(self.b1, self.b2, self.eps)

        own = type(self).__name__.lower()

        def labels(tree: PyTree) -> PyTree:
            return map_by_path(lambda path, leaf: own if self.updates_as_matrix(path, leaf) else "adamw", tree)

        return optax.partition({own: self.matrix_core(run), "adamw": adamw}, labels)

    def check(self, params: PyTree) -> None:
        super().check(params)
        check_patterns([rule.path for rule in self.matrices], params, "optimizer.matrices")

        def fits(path: str, leaf: HasShape) -> None:
            rule = self.rule(path)
            if self.updates_as_matrix(path, leaf) and len(leaf.shape) < rule.inputs + rule.outputs:
                raise ConfigError(
                    f"optimizer.matrices: {rule.path!r} takes {rule.inputs} + {rule.outputs} dims for a matrix, but "
                    f"{path} has the shape {tuple(leaf.shape)}; lower inputs or outputs, or give it adamw: true."
                )

        map_by_path(fits, params)

    def rule(self, path: str) -> MatrixShapeRule:
        """Return the rule for which dims of a parameter form a matrix: the first whose pattern matches its path."""
        return match(path, [(rule.path, rule) for rule in (*self.matrices, *KNOWN)])

    def updates_as_matrix(self, path: str, leaf: HasShape) -> bool:
        """Return True if the matrix update rule applies to a parameter, False if AdamW updates it."""
        return is_matrix(path, leaf) and not self.rule(path).adamw
