"""Base class of methods that set weights to zero."""

import re

from pydantic import Field, model_validator

from jaxstack.compress.methods.base import Method
from jaxstack.compress.prune import Pattern


class PruningMethod(Method):
    """Base of methods that set a fraction of a matrix's weights to zero; the matrix is stored dense, zeros included."""

    sparsity: float = Field(default=0.5, gt=0, lt=1)
    """Share of the weights that become zero. Ignored with a pattern."""
    pattern: str | None = None
    """`n:m` keeps n of every m consecutive inputs, such as 2:4. Default: zeros may be anywhere."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "PruningMethod":
        if self.pattern is None:
            return self
        if not re.fullmatch(r"[1-9]\d?:[1-9]\d?", self.pattern):
            raise ValueError(f"pattern {self.pattern!r} must be n:m, which keeps n of every m inputs, as in 2:4.")
        if not self._kept_of[0] < self._kept_of[1]:
            raise ValueError(f"pattern {self.pattern} keeps n of every m inputs, with n below m, such as 2:4.")
        return self

    @property
    def _kept_of(self) -> tuple[int, int]:
        """n and m of the n:m sparsity pattern; (1, 1) without one."""
        kept, size = (self.pattern or "1:1").split(":")
        return int(kept), int(size)

    @property
    def zeros(self) -> Pattern:
        """Sparsity pattern of the matrix: zeros anywhere, or a fixed number in each group of m inputs."""
        return Pattern(self.sparsity) if self.pattern is None else Pattern(keep_of=self._kept_of)

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        size = self._kept_of[1]
        if inputs % size == 0:
            return None
        return f"the pattern {self.pattern} needs a multiple of {size} inputs; this layer has {inputs}"
