"""Random weights in the formats of a recipe, made on the device: nothing is read from a disk."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxstack.compress.base import Format
from jaxstack.compress.config import Recipe, choose_methods, load_recipe
from jaxstack.compress.matrix import MatrixLayout, compressible_weights
from jaxstack.models import ModelConfig
from jaxstack.stored.packed_base import PackedModel, base_weights
from pallas_kernels import PackedWeight


def random_base(model: ModelConfig, recipe: str) -> PackedModel:
    """Return the dense layers that a recipe compresses, with random weights, as the base of adapters (QLoRA).

    Args:
        model: the model, with unrolled layers and a known vocabulary size; experts are left out.
        recipe: name or file of a recipe; what its methods do beside rounding is left out.
    """
    return PackedModel(Path(recipe), base_weights(random_weights(model, load_recipe(recipe))))


def random_weights(model: ModelConfig, recipe: Recipe) -> dict[str, PackedWeight]:
    """Return random weights by path, rounded to the nearest values of the formats that a recipe gives them.

    Weights of one format and shape have the same values, in arrays of their own: some formats take long to find. What
    is stored as an array, as with zeros that are not 2:4, is left out, and so are experts.
    """
    layouts = {path: layout for path, layout in compressible_weights(model).items() if not layout.stack}
    made: dict[tuple[Format, MatrixLayout], PackedWeight | jax.Array] = {}
    weights = {}
    for path, method in choose_methods(recipe, layouts).items():
        kind = method.format, layouts[path]
        if kind not in made:
            made[kind] = _random_weight(jax.random.key(len(made)), *kind)
        if isinstance(made[kind], PackedWeight):
            weights[path] = jax.tree.map(jnp.copy, made[kind])
    return weights


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_weight(key: jax.Array, form: Format, layout: MatrixLayout) -> PackedWeight | jax.Array:
    """Return a weight in a format, whose outputs are about as large as its inputs."""
    matrix = jax.random.normal(key, layout.size) / math.sqrt(layout.size[1])
    return layout.from_compressed(form.pack(matrix))
