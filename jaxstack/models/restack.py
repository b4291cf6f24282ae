"""Conversion of a model between layouts: layers stacked or unrolled, projections of one input separate or joined."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxstack.models.config import ModelConfig
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.mlp import GatedMLP
from jaxstack.models.transformer import Transformer

Params: TypeAlias = dict[str, Any]
"""Parameters as nested dicts of arrays."""


def restack(params: Params, source: ModelConfig, target: ModelConfig) -> Params:
    """Convert parameters between two configurations of a model that differ in which layers are stacked.

    Args:
      params: nested dicts of arrays.
      source, target: configurations that differ only in `scan_layers` and `unscanned_end_layers`.
    """
    return _restack(params, source, target, lambda x, row: x[row], jnp.stack)


def unroll_layers(config: ModelConfig, params: Params) -> Params:
    """Convert a model's parameters to unrolled layers (`scan_layers: false`), which decode faster.

    A decoding step does little work with each weight: in a loop that slices layers out of a stack, most of its time
    would go into copies of weights and caches. Traceable.

    Args:
      params: nested dicts of arrays.
    """
    return restack(params, config, config.model_copy(update={"scan_layers": False}))


def restack_shapes(abstract: Params, source: ModelConfig, target: ModelConfig) -> Params:
    """Convert the shapes and shardings of parameters in the same way as `restack` converts the arrays."""
    return _restack(abstract, source, target, _take_shape, _stack_shapes)


def same_stacking(source: ModelConfig, target: ModelConfig) -> bool:
    """Return True if two configurations stack the same layers, so that parameters need no conversion."""
    return _layer_groups(source) == _layer_groups(target)


def _layer_groups(config: ModelConfig) -> list[tuple[list[int], bool]]:
    """Return for each item of the model's layer list the indices of its layers, and True if it is a stack of layers."""
    decoder = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).decoder
    return [(list(decoder.layer_numbers(index)), index in decoder.scanned) for index in range(len(decoder.layers))]


def _restack(
    params: Params,
    source: ModelConfig,
    target: ModelConfig,
    take: Callable[[Any, int], Any],
    stack: Callable[[Sequence[Any]], Any],
) -> Params:
    source_layers = params["decoder"]["layers"]
    layers = {}
    for index, (numbers, stacked) in enumerate(_layer_groups(source)):
        for row, number in enumerate(numbers):
            part = source_layers[str(index)]
            layers[number] = jax.tree.map(lambda x, row=row: take(x, row), part) if stacked else part
    target_layers = {
        str(index): jax.tree.map(lambda *parts: stack(parts), *(layers[number] for number in numbers))
        if stacked
        else layers[numbers[0]]
        for index, (numbers, stacked) in enumerate(_layer_groups(target))
    }
    return {**params, "decoder": {**params["decoder"], "layers": target_layers}}


def _take_shape(x: jax.ShapeDtypeStruct, row: int) -> jax.ShapeDtypeStruct:
    del row
    return _shape(x, x.shape[1:], tuple(_sharding(x).spec)[1:])


def _stack_shapes(parts: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    first = parts[0]
    return _shape(first, (len(parts), *first.shape), (None, *_sharding(first).spec))


def _shape(x: jax.ShapeDtypeStruct, shape: tuple[int, ...], spec: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(_sharding(x).mesh, jax.P(*spec)))


def _sharding(x: jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding


ModulePath = tuple[object, ...]
"""Names of attributes and indices that lead to a submodule."""


def join_projections(
    model: nnx.Module, paths: Collection[ModulePath] | None = None, parts: int = 1
) -> frozenset[ModulePath]:
    """Merge query, key and value projections, and gate and up projections, into one dense layer each, in place.

    A decoding step reads each weight once, and each matmul takes a few microseconds more, whatever its size. One
    matmul for queries, keys and values, and one for the gate and the input of an MLP, take that time once.

    Args:
      model: a Transformer.
      paths: the submodules to change, as an earlier call returned them; None: all.
      parts: number of devices among which the outputs are divided, each of which keeps its share of every projection.

    Returns:
      The paths of the submodules that were changed.
    """
    joined = []
    for path, module in list(nnx.iter_modules(model)):
        if not isinstance(module, Attention | GatedMLP) or (paths is not None and path not in paths):
            continue
        if module.join_projections(parts):
            jax.block_until_ready(nnx.state(module))  # The separate matrices are freed before the next are joined.
            joined.append(path)
    return frozenset(joined)
