"""Which dtypes the computation runs in.

Master weights, optimizer state, accumulated gradients, norms and the softmax are float32 in every case.
"""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config import Component


class PrecisionConfig(Component):
    """Compute dtype and low-precision recipe."""

    compute: Literal["bfloat16", "float32"] | None = Field(default=None)
    """Dtype of activations and of the weights' working copies; left out: bfloat16 on a GPU, float32 on a CPU."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices: bfloat16 moves half the bytes, and rounds at every addition."""
    fp8: Literal["none", "delayed", "current", "blockwise"] = "none"

    @model_validator(mode="after")
    def _check(self) -> "PrecisionConfig":
        if self.fp8 != "none":
            raise ValueError(f"fp8: {self.fp8} is not available in this version; use fp8: none.")
        return self

    def compute_dtype(self, platform: str) -> str:
        """The dtype's name with the default of the platform (`cpu`, `gpu`, ...) filled in."""
        return self.compute or ("float32" if platform == "cpu" else "bfloat16")
