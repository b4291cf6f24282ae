"""muP scaling of learning rate, weight decay and epsilon by the role of a parameter and the model's width."""

from typing import TypeVar

from jaxstack.errors import ConfigError
from jaxstack.models.parametrization import Width
from jaxstack.optim.base import HasShape, Optimizer
from jaxstack.optim.matrix_optimizer import MatrixOptimizer

AnyKind = TypeVar("AnyKind", bound=Optimizer)


def check_mup_support(optimizer: Optimizer) -> None:
    """Check that an optimizer supports muP: that its learning-rate scaling with the model's width is known.

    Raises:
      ConfigError: it is not known.
    """
    if optimizer.width_powers is None:
        name = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model.parametrization mup: how the learning rate of optimizer.name {name} depends on the width is not "
            "known; choose adamw, lion, sgd, muon or soap, or model.parametrization=standard."
        )


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
