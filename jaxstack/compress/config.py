"""Configuration of compression: recipes, which choose the method that compresses each dense layer."""

from typing import Literal

from pydantic import Field

from jaxstack.compress.methods import AnyMethod
from jaxstack.config.base import Component


class CalibrationConfig(Component):
    """Configuration of the calibration text, for compression methods that measure the inputs of layers."""

    sequences: int = Field(default=128, ge=1)
    """Number of sequences."""
    sequence_length: int | None = Field(default=None, ge=2)
    """Tokens per sequence. Default: as in training; for a Hugging Face checkpoint 2048, or all
    positions that its model has."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per batch."""
    data: tuple[str, ...] = ()
    """Files, directories or globs. Default: the run's own training text."""


class Recipe(Component):
    """A recipe of `jaxstack compress`: which method compresses which layers, and how other weights are stored."""

    layers: tuple[AnyMethod, ...] = Field(min_length=1)
    """Rules of dense layers, `{path: REGULAR EXPRESSION, method: NAME, ...}`. The first one whose path occurs in the
    path of a layer's weight, such as decoder/layers/3/mlp/down_proj/kernel or head, compresses it; without a matching
    rule it is stored in `store`."""
    calibration: CalibrationConfig = CalibrationConfig()
    """Text that methods which need it are calibrated on."""
    store: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of matrices that are stored as plain numbers: pruned ones, and those that no rule compresses."""
    vectors: Literal["float32", "bfp8"] = "float32"
    """Storage of vectors (scales of norms, biases). bfp8: integers of 8 bits, with an exponent for each block of up to
    64; they are float32 again when they are read."""
