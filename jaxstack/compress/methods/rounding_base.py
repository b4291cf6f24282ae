"""Base class of methods that round weights to integers."""

from typing import Literal, Self

from pydantic import Field, model_validator

from jaxstack.compress.methods.base import Method
from pallas_kernels.weight_only.formats import RoundedInputFormat
from pallas_kernels.weight_only.integer_products import unsupported_inputs
from pallas_kernels.weight_only.rounding_grid import Grid


class RoundingMethod(Method):
    """Base of methods that round weights to integers, with a scale for each output or each group of inputs."""

    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=128, ge=1)
    """Number of inputs that share a scale; null: one scale for each output."""

    activations: Literal["int8"] | None = None
    """int8: the layers also round their inputs, to int8 with a scale for each token, and multiply integers (W8A8); with
    `bits: 8` and `group_size: null`. null: inputs are not rounded."""

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        if self.activations is not None:
            RoundedInputFormat(self.grid)
        return self

    @property
    def rounds_inputs(self) -> bool:
        """True if the layers round their inputs to int8."""
        return self.activations is not None

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        problem = unsupported_inputs(inputs) if self.rounds_inputs else None
        return problem or group_size_problem(self.group_size, inputs)


def group_size_problem(group_size: int | None, inputs: int, name: str = "group_size") -> str | None:
    """Return why groups of `group_size` do not divide a row of `inputs` weights, or None if they do."""
    if group_size is None or inputs % group_size == 0:
        return None
    fitting = max(size for size in range(1, group_size + 1) if inputs % size == 0)
    return f"{name} {group_size} does not divide its {inputs} inputs; the nearest that does is {fitting}"
