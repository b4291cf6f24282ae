"""Several low-rank adapters of a model at once: each token is computed with one of them, or with none.

The matrices of n adapters are stacked, A [in, n, rank] and B [n, rank, out]. All of them multiply all tokens, and what
is not of a token's own adapter is set to zero in between: (x A) masked, times B. That is n times the work of one
adapter, which is small beside that of the layer, in plain matmuls; to gather the matrices of each token, as Punica
(Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285) do, needs kernels of its own.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.errors import ConfigError
from jaxstack.models.linear import Kernel, Linear, multiply

_numbers: ContextVar[jax.Array | None] = ContextVar("adapters of the tokens", default=None)
_WHOLE = ("kv_b_proj",)
"""Layers whose matrix is multiplied with others, and not with tokens."""


@contextlib.contextmanager
def use_adapters(numbers: Int[Array, " T"]) -> Iterator[None]:
    """Within this context layers compute each of their T tokens with the adapter of its number, from 1 on; 0: none."""
    token = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(token)


class LowRank(NamedTuple):
    """Matrices of a layer's adapter, which adds x A B to the layer's output."""

    a: Float[np.ndarray, "..."]
    """A [in, rank], where `in` may be several dims."""
    b: Float[np.ndarray, "..."]
    """B [rank, out] with its scale, where `out` may be several dims."""


AdapterMatrices: TypeAlias = Mapping[str, LowRank]
"""The matrices of an adapter, by the path of their layer in the model, such as `decoder/layers/0/mlp/up_proj`."""


class AdapterStack(nnx.Module):
    """Low-rank adapters of one dense layer, of which `use_adapters` chooses one for each token.

    Args:
      layer: the layer.
      count: number of adapters, all zero at first.
      rank: their rank; those of a smaller one are padded with zeros.
    """

    magnitude = None
    dropout = 0.0

    def __init__(self, layer: Linear, count: int, rank: int):
        shape = layer.kernel.shape
        axes = layer.kernel.get_metadata()["logical_axes"]
        cut = layer.contracted
        self.a = nnx.Param(jnp.zeros((*shape[:cut], count, rank)), logical_axes=(*axes[:cut], "rank", "rank"))
        self.b = nnx.Param(jnp.zeros((count, rank, *shape[cut:])), logical_axes=("rank", "rank", *axes[cut:]))
        self.contracted = cut

    def __call__(self, x: Float[Array, "..."], y: Float[Array, "..."], kernel: Kernel) -> Float[Array, "..."]:
        """Return the layer's output with the tokens' adapters, given x [..., in] and y [..., out] = x @ kernel."""
        del kernel
        numbers = _numbers.get()
        if numbers is None:
            return y
        rows = x.shape[: x.ndim - self.contracted]
        if math.prod(rows) != numbers.size:
            raise ConfigError(
                f"adapters need layers that get the {numbers.size} tokens of a step in one array; one of this model "
                f"gets {rows}. Merge the adapter into the weights, and serve it alone (engine.adapters=0)."
            )
        a, b = (p[...].astype(y.dtype) for p in (self.a, self.b))
        projected = multiply(jax.lax.dot_general, x.astype(y.dtype), a, self.contracted)
        own = jax.nn.one_hot(numbers.reshape(rows) - 1, a.shape[-2], dtype=y.dtype)
        return y + multiply(jax.lax.dot_general, projected * own[..., None], b, 2)


class LayerSizes(NamedTuple):
    """Sizes of a dense layer."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def adaptable_layers(model: Any) -> dict[str, Linear]:
    """Return the dense layers in a Transformer's layers, which adapters may change, by their paths.

    Raises:
      ConfigError: layers are stacked, to be run by a scan.
    """
    found = {}
    for path, layer in nnx.iter_modules(model.decoder):
        if isinstance(layer, Linear) and path[-1] not in _WHOLE:
            if "layers" in layer.kernel.get_metadata()["logical_axes"]:
                raise ConfigError("adapters are served with unrolled layers only; set model.scan_layers=false.")
            found["/".join(map(str, ("decoder", *path)))] = layer
    return found


def sizes_of(layers: Mapping[str, Linear]) -> dict[str, LayerSizes]:
    """Return the sizes of dense layers."""
    shapes = {path: (layer.kernel.shape, layer.contracted) for path, layer in layers.items()}
    return {path: LayerSizes(shape[:cut], shape[cut:]) for path, (shape, cut) in shapes.items()}


def add_adapter_stacks(model: Any, count: int, rank: int) -> dict[str, LayerSizes]:
    """Give the dense layers in a Transformer's layers room for `count` adapters, in place; return their sizes.

    Raises:
      ConfigError: layers are stacked, to be run by a scan.
    """
    layers = adaptable_layers(model)
    for layer in layers.values():
        layer.adapter = nnx.data(AdapterStack(layer, count, rank))
    return sizes_of(layers)


def check_matrices(matrices: AdapterMatrices, layers: Mapping[str, LayerSizes], name: str) -> None:
    """Check that the matrices of an adapter fit a model with these layers.

    Raises:
      ConfigError: they do not, or hold NaN or infinity; the message begins with `name`.
    """
    for path, (a, b) in matrices.items():
        if path not in layers:
            raise ConfigError(f"{name} changes {path}, which is no dense layer of this model.")
        inputs, outputs = layers[path]
        rank = a.shape[-1]
        wanted = (*inputs, rank), (rank, *outputs)
        if (a.shape, b.shape) != wanted:
            raise ConfigError(
                f"{name} has matrices of the shapes {a.shape} and {b.shape} for {path}, where this model needs "
                f"{wanted[0]} and {wanted[1]}."
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ConfigError(f"{name} holds NaN or infinity, in {path}.")
