"""Normalisation over the last dim, in float32, returned in the dtype of the input."""

import functools
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import rms_norm


class Norm(Protocol):
    """A norm is built with `(size, eps)` and maps [..., size] to [..., size]."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang & Sennrich 2019)."""

    offset = 0.0

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return cast(jax.Array, rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset))


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
        return _layer_norm(self.eps, x, self.scale[...], self.bias[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(eps: float, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return _layer_norm_forward(eps, x, scale, bias)[0]


def _layer_norm_forward(eps: float, x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    wide = wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * inverse * scale + bias).astype(x.dtype), (x, scale)


def _layer_norm_backward(eps: float, saved: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # A use of the forward's sums here would split its one kernel into four. All four sums over a row are of one pass.
    x, scale = jax.lax.optimization_barrier(saved)
    x, gradient = x.astype(jnp.float32), gradient.astype(jnp.float32)
    average = lambda values: jnp.mean(values, -1, keepdims=True)  # noqa: E731
    scaled = gradient * scale
    mean, square, along_ones, along_x = average(x), average(x * x), average(scaled), average(scaled * x)
    inverse = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + eps)
    along = (along_x - mean * along_ones) * inverse
    normal, rows = (x - mean) * inverse, tuple(range(x.ndim - 1))
    d_x = (scaled - along_ones - normal * along) * inverse
    return d_x.astype(saved[0].dtype), jnp.sum(gradient * normal, rows), jnp.sum(gradient, rows)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


NORMS = {"rms_norm": RMSNorm, "rms_norm_unit_offset": UnitOffsetRMSNorm, "layer_norm": LayerNorm}
