"""Wraps Flax Linen modules as NNX modules, so that the trainer can use them."""

from typing import Any, cast

from flax import linen as nn
from flax import nnx

from jaxstack.module_arrays.module import NNXFactory


def from_linen(module: nn.Module, *inputs: Any) -> NNXFactory:
    """Wrap a Linen module as a function `rngs -> NNX module`; `inputs` are example inputs, for shape inference.

    Raises:
      TypeError: `module` is no Linen module.
    """
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        way_out = f"give Trainer a function `rngs -> {kind}` instead" if isinstance(module, nnx.Module) else "give one"
        raise TypeError(f"from_linen takes a module of flax.linen; found {type(module).__module__}.{kind}: {way_out}.")
    return lambda rngs: cast(nnx.Module, nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), *inputs))
