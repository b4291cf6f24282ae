"""Conversion of stacked layers to single ones, for decoding."""

from typing import Any

import jax
from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Transformer


def unroll_layers(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Convert the parameters of `Transformer(config)` to those of the same model with `scan_layers: false`.

    A decoding step does little work with each weight: in a loop that slices layers out of a stack, most of its time
    would go into copies of weights and caches. May be traced.

    Args:
      params: nested dicts of arrays.
    """
    stack = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).decoder
    layers = {}
    for index in range(len(stack.layers)):
        tree = params["decoder"]["layers"][str(index)]
        for row, number in enumerate(stack.layer_numbers(index)):
            layers[str(number)] = jax.tree.map(lambda x, row=row: x[row], tree) if index in stack.scanned else tree
    return {**params, "decoder": {**params["decoder"], "layers": layers}}
