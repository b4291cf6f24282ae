"""Base class of methods that round weights to integers."""

from pydantic import Field

from jaxstack.compress.methods.base import Method
from pallas_kernels.weight_only.rounding_grid import Grid


class RoundingMethod(Method):
    """Base of methods that round weights to integers, with a scale for each output or each group of inputs."""

    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer."""
    group_size: int | None = Field(default=128, ge=1)
    """Number of inputs that share a scale; null: one scale for each output."""

    @property
    def grid(self) -> Grid:
        """Integer grid to round weights to: number of bits, and number of inputs that share a scale."""
        return Grid(self.bits, self.group_size)

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_size_problem(self.group_size, inputs)


def group_size_problem(group_size: int | None, inputs: int, name: str = "group_size") -> str | None:
    """Return why groups of `group_size` do not divide a row of `inputs` weights, or None if they do."""
    if group_size is None or inputs % group_size == 0:
        return None
    fitting = max(size for size in range(1, group_size + 1) if inputs % size == 0)
    return f"{name} {group_size} does not divide its {inputs} inputs; the nearest that does is {fitting}"
