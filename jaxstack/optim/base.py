"""What every optimizer's configuration shares, and the interface that a new one implements."""

from abc import abstractmethod
from typing import Any

import jax
import optax
from pydantic import Field

from jaxstack.config.base import Component, PathRule
from jaxstack.tree_rules import check_patterns


def is_matrix(path: str, leaf: Any) -> bool:
    """Whether weight decay applies. Scales, biases and magnitudes are vectors even where they have two dims."""
    return len(leaf.shape) > 1 and path.rsplit("/", 1)[-1] not in ("scale", "bias", "magnitude")


class GroupRule(PathRule):
    """What the optimizer does with the parameters of a path."""

    learning_rate_scale: float = Field(default=1.0, ge=0)
    """Times the scheduled learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Instead of the optimizer's; left out: that one, which spares vectors."""
    frozen: bool | None = None
    """Never updated, without gradients and optimizer state. Left out: what adapters are added to is frozen, all else
    is not."""


class Optimizer(Component):
    """An optimizer: subclass it in a file of its own, with a `name` and a `core`, and add it to `OPTIMIZERS`.

    The chain around the core is the same for all: clip by global norm, core, decoupled weight decay, learning rate.
    """

    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak of the schedule."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled (Loshchilov & Hutter 2019); on matrices only, unless a group says otherwise."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it; null: never."""
    balance_rate: float = Field(default=1e-3, ge=0)
    """How far a step moves the bias of each expert that is above or below an even load (`model.moe.balance_bias`)."""
    groups: tuple[GroupRule, ...] = ()

    def check(self, params: Any) -> None:
        """Refuses settings that do not fit the parameters, or their shapes.

        Raises:
          ConfigError: the path of a rule matches no parameter.
        """
        check_patterns([group.path for group in self.groups], params, "optimizer.groups")

    @abstractmethod
    def core(self) -> optax.GradientTransformation:
        """Gradients -> update direction, without learning rate, weight decay or clipping."""

    def finish(self, update: jax.Array, param: jax.Array) -> jax.Array:
        """What becomes of a direction after the core, where that depends on a whole parameter.

        Of layers that are stored in one array each is given by itself.
        """
        return update
