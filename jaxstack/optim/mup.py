"""muP scaling of learning rate, weight decay and epsilon by parameter role (`jaxstack.models.parametrization`)."""

from typing import TypeVar

from jaxstack.errors import ConfigError
from jaxstack.models.parametrization import Width
from jaxstack.optim.base import HasShape, Optimizer
from jaxstack.optim.matrix_optimizer import MatrixOptimizer

AnyKind = TypeVar("AnyKind", bound=Optimizer)


def check_mup_support(optimizer: Optimizer) -> None:
    """Check that the optimizer supports muP.

    Raises:
      ConfigError: it has none.
    """
    if optimizer.width_powers is None:
        name = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model.parametrization mup: how the learning rate of optimizer.name {name} depends on the width is not "
            "known; choose adamw, lion, sgd, muon or soap, or model.parametrization=standard."
        )


def rate_factor(optimizer: Optimizer, width: Width, path: str, leaf: HasShape) -> float:
    """Return the factor of a parameter's learning rate.

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
    """Return the optimizer with epsilon divided by the width ratio, since gradients shrink with the width."""
    if "eps" not in type(optimizer).model_fields:
        return optimizer
    return optimizer.model_copy(update={"eps": getattr(optimizer, "eps") / width.ratio})  # noqa: B009
