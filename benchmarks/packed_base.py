"""A packed base for adapters (QLoRA) with random weights, made on the device: nothing is read from a disk."""

import functools
import math
from pathlib import Path

import jax

from jaxstack.compress.base import Format
from jaxstack.compress.config import choose_methods, load_recipe
from jaxstack.compress.matrix import MatrixLayout, compressible_weights
from jaxstack.models import ModelConfig
from jaxstack.stored.packed_base import PackedModel, base_weights
from pallas_kernels import PackedWeight


def random_base(model: ModelConfig, recipe: str) -> PackedModel:
    """Return the dense layers that a recipe compresses, with random weights, each rounded to the nearest values.

    Args:
        model: the model, with unrolled layers and a known vocabulary size; experts are left out.
        recipe: name or file of a recipe; what its methods do beside rounding is left out.
    """
    layouts = {path: layout for path, layout in compressible_weights(model).items() if not layout.stack}
    methods = choose_methods(load_recipe(recipe, []), layouts)
    packed = {
        path: weight
        for number, (path, method) in enumerate(methods.items())
        if isinstance(weight := _random_weight(jax.random.key(number), method.format, layouts[path]), PackedWeight)
    }
    return PackedModel(Path(recipe), base_weights(packed))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_weight(key: jax.Array, form: Format, layout: MatrixLayout) -> PackedWeight | jax.Array:
    """Return a weight in a format, whose outputs are about as large as its inputs."""
    matrix = jax.random.normal(key, layout.size) / math.sqrt(layout.size[1])
    return layout.from_compressed(form.pack(matrix))
