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


def add_adapter_stacks(model: Any, count: int, rank: int) -> list[str]:
    """Give the dense layers in a Transformer's layers room for `count` adapters, in place; return their paths.

    Raises:
      ConfigError: layers are stacked, to be run by a scan.
    """
    found = []
    for path, layer in nnx.iter_modules(model.decoder):
        if isinstance(layer, Linear) and path[-1] not in _WHOLE:
            if "layers" in layer.kernel.get_metadata()["logical_axes"]:
                raise ConfigError("adapters are served with unrolled layers only; set model.scan_layers=false.")
            layer.adapter = nnx.data(AdapterStack(layer, count, rank))
            found.append("/".join(map(str, ("decoder", *path))))
    return found
