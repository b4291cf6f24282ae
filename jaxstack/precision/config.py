"""Which dtypes the computation runs in.

Master weights, optimizer state, accumulated gradients, norms and the softmax are float32 in every case.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component, PathRule

_PROJECTIONS = r"/(attention/(q|k|v|o)_proj|mlp/(gate|up|down)_proj)/kernel$"


class Fp8Rule(PathRule):
    """Which matmuls run in FP8, by paths of weights such as decoder/layers/3/mlp/down_proj/kernel (scanned or not)."""

    fp8: bool


class PrecisionConfig(Component):
    """Compute dtype and low-precision recipe."""

    compute: Literal["bfloat16", "float32"] | None = Field(default=None)
    """Dtype of activations and of the weights' working copies; left out: bfloat16 on a GPU, float32 on a CPU."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices: bfloat16 moves half the bytes, and rounds at every addition."""
    fp8: Literal["none", "delayed", "current", "blockwise"] = "none"
    """How the layers' matmuls are scaled for FP8, if at all: by each tensor's largest value in this step (current) or
    in the last ones (delayed), or by blocks of 128 values (blockwise)."""
    fp8_gradients: Literal["e5m2", "e4m3"] = "e5m2"
    """Format of the gradients that come into a matmul: more range, or more digits. Blockwise always takes e4m3."""
    fp8_history: int = Field(default=16, ge=1)
    """Steps that delayed scaling looks back."""
    fp8_rules: tuple[Fp8Rule, ...] = ()
    """Without them the projections of attention and MLP run in FP8, but for those of the first and the last layer;
    `{path: _proj, fp8: true}` adds these."""

    @model_validator(mode="after")
    def _check(self) -> "PrecisionConfig":
        if self.fp8_rules and self.fp8 == "none":
            raise ValueError("fp8_rules say which matmuls run in FP8, but fp8 is none; choose a recipe or drop them.")
        return self

    def compute_dtype(self, platform: str) -> str:
        """The dtype's name with the default of the platform (`cpu`, `gpu`, ...) filled in."""
        return self.compute or ("float32" if platform == "cpu" else "bfloat16")

    def path_rules(self, left_out: Sequence[int] = ()) -> tuple[tuple[str, bool], ...]:
        """(path, whether it runs in FP8), for `jaxstack.tree_rules.match`.

        Args:
          left_out: layers that no projection of runs in FP8 unless a rule says so.
        """
        own = ((rule.path, rule.fp8) for rule in self.fp8_rules)
        plain = ((f"^decoder/layers/{number}/", False) for number in left_out)
        return (*own, *plain, (_PROJECTIONS, True), (".*", False))
