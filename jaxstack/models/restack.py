"""Parameters of one model in another stacking of its layers: scanned, unrolled, or with single layers at the ends."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Transformer


def restack(params: Any, source: ModelConfig, target: ModelConfig) -> Any:
    """The parameters of `Transformer(source)`, nested dicts, as those of `Transformer(target)`.

    The models may differ in `scan_layers` and `unscanned_end_layers`.
    """
    return _restack(params, source, target, lambda x, row: x[row], jnp.stack)


def restack_shapes(abstract: Any, source: ModelConfig, target: ModelConfig) -> Any:
    """`restack` of abstract arrays with shardings, which stay as they are but for the dim of the layers."""
    return _restack(abstract, source, target, _take_shape, _stack_shapes)


def same_stacking(source: ModelConfig, target: ModelConfig) -> bool:
    """Whether `restack` would change nothing."""
    return _parts(source) == _parts(target)


def _parts(config: ModelConfig) -> list[tuple[list[int], bool]]:
    """Of each entry of `Stack.layers`, which layers of the model it holds, and whether they are stacked."""
    decoder = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).decoder
    return [(list(decoder.layer_numbers(index)), index in decoder.scanned) for index in range(len(decoder.layers))]


def _restack(
    params: Any,
    source: ModelConfig,
    target: ModelConfig,
    take: Callable[[Any, int], Any],
    stack: Callable[[Sequence[Any]], Any],
) -> Any:
    kept, layers = params["decoder"]["layers"], {}
    for index, (numbers, stacked) in enumerate(_parts(source)):
        for row, number in enumerate(numbers):
            part = kept[str(index)]
            layers[number] = jax.tree.map(lambda x, row=row: take(x, row), part) if stacked else part
    made = {
        str(index): jax.tree.map(lambda *parts: stack(parts), *(layers[number] for number in numbers))
        if stacked
        else layers[numbers[0]]
        for index, (numbers, stacked) in enumerate(_parts(target))
    }
    return {**params, "decoder": {**params["decoder"], "layers": made}}


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
