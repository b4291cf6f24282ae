"""Normalization over the last dim, computed in float32 and returned in the dtype of the input."""

import functools
import math
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import NormalisedInput, layer_norm, rms_norm

LayerInput = jax.Array | NormalisedInput
"""Input of a dense layer: an array, or an RMSNorm that the layer may recompute while it rounds to FP8."""


def gradient_carrier(x: LayerInput) -> jax.Array:
    """Return a dense layer's input as the array that receives its gradient: x itself, or the norm's output."""
    return x.carrier if isinstance(x, NormalisedInput) else x


@runtime_checkable
class Norm(Protocol):
    """Interface of a normalization over the last dim; constructors take `(size, eps)`."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


class RMSNorm(nnx.Module):
    """RMS normalization, x / rms(x) * scale (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    offset = 0.0

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return cast(jax.Array, rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset))

    def with_residual(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
        """Return (norm(x), x); with this x as the residual, one backward kernel sums both gradients of x."""
        return cast(
            tuple[jax.Array, jax.Array],
            rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset, return_input=True),
        )

    def as_layer_input(self, normalized: Float[Array, "... D"], x: Float[Array, "... D"]) -> NormalisedInput:
        """Bundle the normalized array with x and scale, so that FP8 dense layers can recompute instead of store it."""
        return NormalisedInput(normalized, x, self.scale[...] + self.offset, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """RMS normalization with gain 1 + scale, where scale starts at 0 (Gemma)."""

    offset = 1.0

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.scale = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))


class HeadsNorm(nnx.Module):
    """RMS normalization of all heads of a token together, x / rms(x) * scale, over the last two dims [N, H] (OLMo 2).

    It is computed by XLA, which sums squares over the devices that share the heads.

    Args:
      heads: number N of heads.
      axis: logical axis of the heads.
    """

    def __init__(self, heads: int, size: int, eps: float, axis: str):
        self.scale = nnx.Param(jnp.ones((heads, size), jnp.float32), logical_axes=(axis, "head_dim"))
        self.eps = eps

    def __call__(self, x: Float[Array, "... N H"]) -> Float[Array, "... N H"]:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.eps) * self.scale[...]).astype(x.dtype)


class RMSNormWithoutGain(nnx.Module):
    """RMS normalization without parameters, x / rms(x)."""

    def __init__(self, eps: float):
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalization, (x - mean) / std * scale + bias (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return cast(jax.Array, layer_norm(x, self.scale[...], self.bias[...], epsilon=self.eps))

    def with_residual(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
        """Return (norm(x), x); with this x as the residual, one backward kernel sums both gradients of x."""
        return cast(
            tuple[jax.Array, jax.Array],
            layer_norm(x, self.scale[...], self.bias[...], epsilon=self.eps, return_input=True),
        )


NORMS: dict[str, type[nnx.Module]] = {
    "rms_norm": RMSNorm,
    "rms_norm_unit_offset": UnitOffsetRMSNorm,
    "layer_norm": LayerNorm,
}
"""Norms by the name that `ModelConfig.norm` has for them. A new norm is a class and a row here."""


def make_norm(name: str, size: int, eps: float) -> Norm:
    """Create the norm with this name from the table `NORMS`, for a last dim of `size`."""
    return cast(Norm, NORMS[name](size, eps))  # pyright: ignore[reportCallIssue]


def head_norm_name(name: str) -> str:
    """Return the name of the norm for query and key heads, in a model whose other norms are `name`."""
    return "rms_norm" if name == "layer_norm" else name


def count_norm_parameters(name: str, size: int) -> int:
    """Count the parameters of the norm with this name, for a last dim of `size`."""
    return _count_parameters(NORMS[name], size)


@functools.cache
def _count_parameters(kind: type[nnx.Module], size: int) -> int:
    state = nnx.state(nnx.eval_shape(lambda: kind(size, 1e-5)), nnx.Param)  # pyright: ignore[reportCallIssue]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
