"""Wrapper with which the trainer can use Flax Linen modules as NNX modules."""

from typing import Any, cast

from flax import linen as nn
from flax import nnx

from jaxstack.functional.module import NNXFactory


def from_linen(module: nn.Module, *inputs: Any) -> NNXFactory:
    """Wrap a Linen module as a function `rngs -> NNX module`; `inputs` are examples, from which it learns shapes."""
    return lambda rngs: cast(nnx.Module, nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), *inputs))
