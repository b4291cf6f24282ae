"""Elementwise activation functions of a feed-forward layer, each with its gradient written out for use in a kernel."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pointwise.gated import swiglu

Arrays = tuple[jax.Array, ...]

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = 0.044715 * _SLOPE


class Activation(NamedTuple):
    """An elementwise activation function, `forward(*inputs)`, and its gradient, `gradient(inputs, d_hidden)`.

    All arrays have one shape.

    Attributes:
        inputs: number of inputs.
        forward: the activation.
        gradient: its gradient.
        in_kernel: the activation written for a kernel; None: no kernel computes it.
    """

    inputs: int
    forward: Callable[..., jax.Array]
    gradient: Callable[[Arrays, jax.Array], Arrays]
    in_kernel: Callable[[jax.Array], jax.Array] | None = None


def _gelu(x: jax.Array) -> jax.Array:
    """Compute GELU with tanh in fewer operations than `jax.nn.gelu`; the last bits of the result may differ."""
    half = 0.5 * x
    return half + half * jnp.tanh(x * (_SLOPE + _CUBE * (x * x)))


def _gelu_gradient(inputs: Arrays, d_hidden: jax.Array) -> Arrays:
    (x,) = inputs
    square = x * x
    tanh = jnp.tanh(x * (_SLOPE + _CUBE * square))
    return (d_hidden * (0.5 + 0.5 * tanh + (0.5 * x) * (_SLOPE + 3 * _CUBE * square) * (1 - tanh * tanh)),)


def _swiglu_gradient(inputs: Arrays, d_hidden: jax.Array) -> Arrays:
    # As `swiglu_gradients`, with the sigmoid computed by tanh, for which GPUs have an instruction.
    gate, up = inputs
    sigmoid = 0.5 + 0.5 * jnp.tanh(0.5 * gate)
    silu = gate * sigmoid
    return d_hidden * up * (sigmoid + silu * (1 - sigmoid)), d_hidden * silu


ACTIVATIONS = {
    "gelu_tanh": Activation(1, lambda x: jax.nn.gelu(x, approximate=True), _gelu_gradient, _gelu),
    "swiglu": Activation(2, swiglu, _swiglu_gradient),
}
"""GELU with tanh (Hendrycks and Gimpel, arXiv:1606.08415), and SwiGLU of gate and up (Shazeer, arXiv:2002.05202)."""
