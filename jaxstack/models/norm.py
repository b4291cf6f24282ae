"""Normalisation over the last dim, in float32, returned in the dtype of the input."""

from typing import Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import NormalisedInput, layer_norm, rms_norm

Pair = tuple[jax.Array, jax.Array]


class Norm(Protocol):
    """A norm is built with `(size, eps)` and maps [..., size] to [..., size]."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


def beside(norm: Norm, x: jax.Array) -> Pair:
    """The normalised x, and x: what goes on past the norm. Where a norm has a method `beside`, which returns both, x's
    gradient joins the norm's in one pass."""
    own = getattr(norm, "beside", None)
    return (norm(x), x) if own is None else own(x)


def as_input(norm: Norm, y: jax.Array, x: jax.Array) -> jax.Array | NormalisedInput:
    """y = norm(x) for dense layers, which in FP8 compute an RMSNorm again while they round it, and then need no y."""
    if not isinstance(norm, RMSNorm):
        return y
    return NormalisedInput(y, x, norm.scale[...] + norm.offset, norm.eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang & Sennrich 2019)."""

    offset = 0.0

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return cast(jax.Array, rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset))

    def beside(self, x: jax.Array) -> Pair:
        """(norm(x), x)."""
        return cast(Pair, rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset, return_input=True))


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm whose gain is 1 + scale, with scale starting at 0 (Gemma)."""

    offset = 1.0

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.scale = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return cast(jax.Array, layer_norm(x, self.scale[...], self.bias[...], epsilon=self.eps))

    def beside(self, x: jax.Array) -> Pair:
        """(norm(x), x)."""
        return cast(Pair, layer_norm(x, self.scale[...], self.bias[...], epsilon=self.eps, return_input=True))


NORMS = {"rms_norm": RMSNorm, "rms_norm_unit_offset": UnitOffsetRMSNorm, "layer_norm": LayerNorm}
