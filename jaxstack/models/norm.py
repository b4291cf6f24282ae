"""Normalisation over the last dim, in float32, returned in the dtype of the input."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Norm(Protocol):
    """A norm is built with `(size, eps)` and maps [..., size] to [..., size]."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (wide * self.gain()).astype(x.dtype)

    def gain(self) -> jax.Array:
        return self.scale[...]


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm whose gain is 1 + scale, with scale starting at 0 (Gemma)."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.scale = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))

    def gain(self) -> jax.Array:
        return 1.0 + self.scale[...]


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (wide * self.scale[...] + self.bias[...]).astype(x.dtype)


NORMS = {"rms_norm": RMSNorm, "rms_norm_unit_offset": UnitOffsetRMSNorm, "layer_norm": LayerNorm}
