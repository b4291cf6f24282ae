"""Base class of methods that set weights to zero."""

from pydantic import Field

from jaxstack.compress.methods.base import Method
from jaxstack.compress.prune import Pattern


class PruningMethod(Method):
    """Sets weights to zero; the matrix is stored as plain numbers."""

    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of the weights that become zero. Ignored with a pattern."""
    pattern: str | None = Field(default=None, pattern=r"^[1-9]\d?:[1-9]\d?$")
    """`n:m` keeps n of every m consecutive inputs, such as 2:4. Default: zeros may be anywhere."""

    @property
    def zeros(self) -> Pattern:
        """Where zeros may be: anywhere, or in groups of m."""
        if self.pattern is None:
            return Pattern(self.sparsity)
        kept, size = map(int, self.pattern.split(":"))
        return Pattern(keep_of=(kept, size))

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        size = 1 if self.pattern is None else int(self.pattern.split(":")[1])
        if inputs % size == 0:
            return None
        return f"the pattern {self.pattern} needs a multiple of {size} inputs; this layer has {inputs}"
