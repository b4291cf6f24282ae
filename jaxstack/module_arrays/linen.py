"""Wraps Flax Linen modules as NNX modules, so that the trainer can use them."""

from typing import Any, cast

from flax import linen as nn
from flax import nnx

from jaxstack.module_arrays.module import NNXFactory


def from_linen(module: nn.Module, *inputs: Any) -> NNXFactory:
    """Wrap a Linen module as a function `rngs -> NNX module`; `inputs` are example inputs, for shape inference."""
    return lambda rngs: cast(nnx.Module, nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), *inputs))
