"""Gradients of collective matmuls: the backward of all-gather + matmul is matmul + reduce-scatter, and vice versa."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul.request import Multiplier

Gradients = TypeVar("Gradients", jax.Array, tuple[jax.Array, ...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_multiply(
    multiplier: Multiplier, axis_name: str, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Compute all_gather(x) @ w for each w, differentiably: [T/n, D] and [D, F/n] to [T, F/n]."""
    return multiplier.gather_multiply(x, weights, axis_name, False)[0]


def _gather_forward(multiplier: Multiplier, axis_name: str, x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple:
    outs, gathered = multiplier.gather_multiply(x, weights, axis_name, False)
    return outs, (gathered, weights)


def _gather_backward(multiplier: Multiplier, axis_name: str, saved: tuple, d_outs: tuple[jax.Array, ...]) -> tuple:
    gathered, weights = saved
    d_x = multiplier.multiply_scatter(d_outs, weights, axis_name, True)
    d_weights = tuple(_weight_gradient(gathered, d).astype(w.dtype) for w, d in zip(weights, d_outs, strict=True))
    return _at_once(d_x, d_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_scatter(multiplier: Multiplier, axis_name: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute psum_scatter(x @ w), differentiably: [T, F/n] and [F/n, D] to [T/n, D]."""
    return multiplier.multiply_scatter((x,), (w,), axis_name, False)


def _scatter_forward(multiplier: Multiplier, axis_name: str, x: jax.Array, w: jax.Array) -> tuple:
    return multiplier.multiply_scatter((x,), (w,), axis_name, False), (x, w)


def _scatter_backward(multiplier: Multiplier, axis_name: str, saved: tuple, d_out: jax.Array) -> tuple:
    x, w = saved
    # The product for the gradient of x gathers the rows that the gradient of w needs too.
    (d_x,), gathered = multiplier.gather_multiply(d_out, (w,), axis_name, True)
    return _at_once(d_x, _weight_gradient(x, gathered).astype(w.dtype))


def _at_once(d_x: jax.Array, d_weights: Gradients) -> tuple[jax.Array, Gradients]:
    # Nothing else waits for weight gradients: without the barrier XLA computes them at the end of an unrolled backward
    # pass, and the gathered rows and cotangents of all layers stay in memory until then.
    return jax.lax.optimization_barrier((d_x, d_weights))


def _weight_gradient(left: jax.Array, right: jax.Array) -> jax.Array:
    return jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


gather_multiply.defvjp(_gather_forward, _gather_backward)
multiply_scatter.defvjp(_scatter_forward, _scatter_backward)
