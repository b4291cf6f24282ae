"""muP scaling of learning rate, weight decay and epsilon by the role of a parameter and the model's width."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxstack.errors import ConfigError
from jaxstack.models.initialization import Role, Width
from jaxstack.optim.base import HasShape, MatrixOptimizer, Optimizer
from jaxstack.parameter_paths import map_by_path

AnyKind = TypeVar("AnyKind", bound=Optimizer)

_NORM_POWERS: Mapping[Role, float] = {"input": 0.5, "hidden": 0.0, "output": -0.5, "final_gain": -0.5}
"""Role -> p of the factor (width / base width)^p that makes the norm of a gradient in muP independent of the width: its
elements are of order 1/width in embeddings, and of order 1 in the head, whose initial weights shrink by 1/width."""


NO_WIDTH_RULE = (
    "model.parametrization mup: how the learning rate of optimizer.name {optimizer.name} depends on the width is not "
    "known; choose adamw, lion, sgd, muon or soap, or model.parametrization=standard."
)
"""Error message of an optimizer that does not support muP."""


def check_mup_support(optimizer: Optimizer) -> None:
    """Check that an optimizer supports muP: that its learning-rate scaling with the model's width is known.

    Raises:
      ConfigError: it is not known.
    """
    if optimizer.width_powers is None:
        name = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(NO_WIDTH_RULE.replace("{optimizer.name}", name))


def rate_factor(optimizer: Optimizer, width: Width, path: str, leaf: HasShape) -> float:
    """Return the factor by which muP scales a parameter's learning rate at the given model width.

    Its weight decay is divided by the factor, so that rate x decay does not depend on the width.
    """
    assert optimizer.width_powers is not None
    power = optimizer.width_powers[width.role(path)]
    if (
        isinstance(optimizer, MatrixOptimizer)
        and optimizer.updates_as_matrix(path, leaf)
        and width.role(path) == "hidden"
    ):
        power = optimizer.matrix_width_power
    return width.ratio**power


def scale_epsilon(optimizer: AnyKind, width: Width) -> AnyKind:
    """Return an optimizer configuration with epsilon scaled for muP: divided by the model's width / base width."""
    if "eps" not in type(optimizer).model_fields:
        return optimizer
    return optimizer.model_copy(update={"eps": getattr(optimizer, "eps") / width.ratio})  # noqa: B009


def clip_by_scaled_norm(limit: float, width: Width) -> optax.GradientTransformation:
    """Return an Optax transformation that clips gradients by a global norm that does not depend on the width in muP.

    The norm of each parameter's gradient is scaled by its role first. Otherwise wide models, in which the head's
    gradients dominate, are clipped where the base model is not, and the learning rate of SGD does not transfer.
    At the base width it is `optax.clip_by_global_norm`.

    Args:
      limit: largest norm.
      width: the model's width.
    """

    def update(updates: PyTree, params: PyTree = None) -> PyTree:
        scaled = map_by_path(lambda path, g: g * width.ratio ** _NORM_POWERS[width.role(path)], updates)
        norm = optax.tree.norm(scaled)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit), updates)

    return optax.stateless(update)
