"""Configuration of numeric precision: dtypes of the computation, and FP8.

Master weights, optimizer state, accumulated gradients, norms and the softmax are float32 in every case.
"""

import functools
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component, PathRule
from jaxstack.config.features import Feature

_PROJECTIONS = r"/(attention/(q|k|v|o)_proj|mlp/(gate|up|down)_proj)/kernel$"


class Fp8Rule(PathRule):
    """Rule whether matmuls run in FP8, by the path of the weight, e.g. decoder/layers/3/mlp/down_proj/kernel."""

    fp8: bool


class PrecisionConfig(Component):
    """Configuration of numeric precision: dtypes of computation, gradient sums and KV cache, and the FP8 recipe."""

    compute: Literal["bfloat16", "float32"] | None = Field(default=None)
    """Dtype of activations and of the weights' working copies; default: bfloat16 on a GPU, float32 on a CPU."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices: bfloat16 moves half the bytes, and rounds at every addition."""
    fp8: Literal["none", "delayed", "current", "blockwise"] = "none"
    """FP8 recipe of the layers' matmuls. none: no FP8. current, delayed: one scale per tensor, from its largest
    magnitude in this step or in the last steps. blockwise: one scale per block of 128 values."""
    fp8_gradients: Literal["e5m2", "e4m3"] = "e5m2"
    """Format of the output gradients in the backward matmuls: more range (e5m2) or more digits (e4m3). Blockwise
    scaling always uses e4m3."""
    fp8_history: int = Field(default=16, ge=1)
    """Number of past steps whose largest magnitudes delayed scaling uses."""
    kv_cache: Literal["none", "int8", "fp8", "int4", "k8v4", "bfp12"] = "none"
    """Format of the cache of keys and values in generation, evaluation and serving. none: the compute dtype; int8: one
    scale for each head and token, 8 bits a value in all; fp8: e4m3; int4: one scale for 32 values; k8v4: keys as in
    int8, values as in int4; bfp12: block floating point, keys in 4 bits with sorted channels, values in 8. Training
    does not use it."""
    fp8_rules: tuple[Fp8Rule, ...] = ()
    """Rules that precede the default. The default: the projections of attention and MLP run in FP8, except in the first
    and the last layer unless these are stacked with others; `{path: _proj, fp8: true}` includes these."""

    @model_validator(mode="after")
    def _check(self) -> "PrecisionConfig":
        if self.fp8_rules and self.fp8 == "none":
            raise ValueError("fp8_rules say which matmuls run in FP8, but fp8 is none; choose a recipe or drop them.")
        return self

    def compute_dtype(self, platform: str) -> str:
        """Return the name of the compute dtype, with the default of the platform (`cpu`, `gpu`, ...) filled in."""
        return self.compute or ("float32" if platform == "cpu" else "bfloat16")

    def path_rules(self, layers_without_fp8: Sequence[int] = ()) -> tuple[tuple[str, bool], ...]:
        """Return rules (weight path pattern, True for FP8) that choose the matmuls in FP8; the first match decides.

        Args:
          layers_without_fp8: layers that stay in the compute dtype unless `fp8_rules` name them.
        """
        own = ((rule.path, rule.fp8) for rule in self.fp8_rules)
        plain = ((f"^decoder/layers/{number}/", False) for number in layers_without_fp8)
        return (*own, *plain, (_PROJECTIONS, True), (".*", False))


def _has_recipe(name: str, precision: PrecisionConfig) -> bool:
    return precision.fp8 == name


FEATURES = (
    *(
        Feature(
            f"FP8 ({name})",
            "precision",
            functools.partial(_has_recipe, name),
            (f"precision.fp8={name}",),
        )
        for name in ("current", "delayed", "blockwise")
    ),
    Feature(
        "bfloat16 computation",
        "precision",
        lambda precision: precision.compute == "bfloat16",
        ("precision.compute=bfloat16",),
    ),
    Feature(
        "bfloat16 reduction",
        "precision",
        lambda precision: precision.reduce == "bfloat16",
        ("precision.reduce=bfloat16",),
    ),
)
"""Features of numeric precision, see `jaxstack.config.features`."""
