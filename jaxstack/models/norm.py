"""Normalisation over the last dim, in float32, returned in the dtype of the input."""

import functools
from typing import Protocol

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
        return rms_norm(x, self.scale[...], epsilon=self.eps, weight_offset=self.offset)


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
    return (wide * inverse * scale + bias).astype(x.dtype), (x, mean, inverse, scale)


def _layer_norm_backward(eps: float, saved: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, inverse, scale = saved
    # Without the barrier XLA computes both again, and then has to write a float32 array as large as x for the scale.
    mean, inverse = jax.lax.optimization_barrier((mean, inverse))
    rows = tuple(range(x.ndim - 1))
    normal, wide = (x.astype(jnp.float32) - mean) * inverse, gradient.astype(jnp.float32)
    scaled = wide * scale
    inner = scaled - jnp.mean(scaled, -1, keepdims=True) - normal * jnp.mean(scaled * normal, -1, keepdims=True)
    return (inner * inverse).astype(x.dtype), jnp.sum(wide * normal, rows), jnp.sum(wide, rows)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


NORMS = {"rms_norm": RMSNorm, "rms_norm_unit_offset": UnitOffsetRMSNorm, "layer_norm": LayerNorm}
