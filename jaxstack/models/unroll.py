"""Parameters of stacked layers as those of single ones."""

from typing import Any

import jax
from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Transformer


def unroll_layers(config: ModelConfig, params: Any) -> Any:
    """The parameters of `Transformer(config)`, nested dicts, for the same model with `scan_layers: false`. Traceable.

    A step of decoding does little with each weight: where it takes layers out of a stack in a loop, most of its time
    goes into copies of weights and caches.
    """
    stack = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).decoder
    layers = {}
    for index in range(len(stack.layers)):
        tree = params["decoder"]["layers"][str(index)]
        for row, number in enumerate(stack.layer_numbers(index)):
            layers[str(number)] = jax.tree.map(lambda x, row=row: x[row], tree) if index in stack.scanned else tree
    return {**params, "decoder": {**params["decoder"], "layers": layers}}
