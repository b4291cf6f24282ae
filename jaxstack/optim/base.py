"""Base class of all optimizer configurations: shared settings, and the interface of a new optimizer."""

from abc import abstractmethod
from typing import Protocol

import jax
import optax
from jaxtyping import PyTree
from pydantic import Field

from jaxstack.config.base import Component, PathRule
from jaxstack.tree_rules import check_patterns


class HasShape(Protocol):
    """An array, a `jax.ShapeDtypeStruct` or anything else with a shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def is_matrix(path: str, leaf: HasShape) -> bool:
    """Return True if weight decay applies to the parameter.

    Scales, biases and magnitudes count as vectors even if they have two dims.
    """
    return len(leaf.shape) > 1 and path.rsplit("/", 1)[-1] not in ("scale", "bias", "magnitude")


class GroupRule(PathRule):
    """Optimizer settings of the parameters whose path matches."""

    learning_rate_scale: float = Field(default=1.0, ge=0)
    """Factor of the scheduled learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Replaces the optimizer's weight decay. Default: the optimizer's, which does not apply to vectors."""
    frozen: bool | None = None
    """True: the parameters are never updated, and have neither gradients nor optimizer state. Default: a layer's own
    parameters are frozen in a model with adapters; nothing is frozen in a model without."""


class Optimizer(Component):
    """Base class of optimizers. A subclass has its own file, a `name` and a `core`, and is listed in `OPTIMIZERS`.

    The chain around `core` is the same for all: clip by global norm, core, decoupled weight decay, learning rate.
    """

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
        """Check that the settings fit the parameters.

        Args:
          params: the parameters or their shapes.

        Raises:
          ConfigError: the path of a rule matches no parameter.
        """
        check_patterns([group.path for group in self.groups], params, "optimizer.groups")

    @abstractmethod
    def core(self) -> optax.GradientTransformation:
        """Return the transformation of gradients into an update direction, without learning rate and weight decay."""

    def finish(self, update: jax.Array, param: jax.Array) -> jax.Array:
        """Transform the update direction that `core` returned, if that takes a whole parameter such as its norm.

        Layers that are stacked in one array are passed one at a time.

        Args:
          update: direction from `core`, with the parameter's shape.
          param: the parameter.

        Returns:
          The new direction.
        """
        return update
