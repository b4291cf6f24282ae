"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467) and LayerNorm (Ba et al., arXiv:1607.06450).

A residual stream continues past the norm. If a function also returns its input, the residual branch can use that
result, and the backward adds the branch's gradient in the pass that it makes anyway.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.batch_invariant.rows import normalize
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.normalization import triton_launch as norm_triton
from pallas_kernels.target import current_target


class NormOptions(NamedTuple):
    """Static arguments of a norm (epsilon, centered, offset): hashable, not differentiated."""

    epsilon: float
    centered: bool = False
    """True for LayerNorm, which subtracts the mean first."""
    offset: float = 0.0
    """Number added to the weight."""
    invariant: bool = False
    """True: the sums of a row do not depend on the number of rows."""


def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"] | None = None,
    *,
    residual: Float[Array, "*rows D"] | None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    return_input: bool = False,
) -> Float[Array, "*rows D"] | tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Compute x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset) over the last dim, in float32.

    Only x is saved for the backward.

    Args:
        x: [..., D].
        weight: [D], or None for no scale.
        residual: [..., D]; if given, x + residual is normalised, and returned too.
        epsilon: added to the mean square.
        weight_offset: number added to the weight: 1.0 for Gemma, whose checkpoints contain weight - 1.
        return_input: True to return x too, for a residual branch whose gradient is then added in the norm's backward.

    Returns:
        The normalised [..., D] in the dtype of x; with `residual` the pair (normalised, x + residual), with
        `return_input` the pair (normalised, x).

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(x, weight)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {list(x.shape)}; got {list(residual.shape)}")
    options = NormOptions(epsilon, offset=weight_offset, invariant=is_batch_invariant())
    if residual is not None:
        return _normalise_and_return_input(options, x + residual, weight, None)
    return (_normalise_and_return_input if return_input else _normalise)(options, x, weight, None)


def layer_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"],
    *,
    epsilon: float = 1e-5,
    return_input: bool = False,
) -> Float[Array, "*rows D"] | tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Compute (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, in float32.

    Only x is saved for the backward.

    Args:
        x: [..., D].
        weight, bias: [D].
        epsilon: added to the variance.
        return_input: True to return x too, for a residual branch whose gradient is then added in the norm's backward.

    Returns:
        The normalised [..., D] in the dtype of x; with `return_input` the pair (normalised, x).

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(x, weight)
    _check(x, bias)
    return (_normalise_and_return_input if return_input else _normalise)(
        NormOptions(epsilon, centered=True, invariant=is_batch_invariant()), x, weight, bias
    )


def _check(x: jax.Array, weight: jax.Array | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {list(x.shape[-1:])}, the last dim of x; got {list(weight.shape)}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(options: NormOptions, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    return _forward_rule(options, x, weight, bias)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise_and_return_input(
    options: NormOptions, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _forward_rule(options, x, weight, bias)[0], x


def _forward_rule(options: NormOptions, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> tuple:
    if options.invariant and weight is not None:
        gain = weight.astype(jnp.float32) + options.offset
        return normalize(x, gain, bias, options.epsilon), (x, weight, bias)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if options.centered:
        wide = wide - wide.mean(axis=-1, keepdims=True)
    out = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + options.epsilon)
    if weight is not None:
        out = out * (weight.astype(wide.dtype) + options.offset)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return out.astype(x.dtype), (x, weight, bias)


def _forward_rule_with_input(
    options: NormOptions, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None
) -> tuple:
    out, saved = _forward_rule(options, x, weight, bias)
    return (out, x), saved


def _backward_rule(options: NormOptions, saved: tuple, d_out: jax.Array) -> tuple:
    return _gradients(options, saved, d_out, None)


def _backward_rule_with_input(options: NormOptions, saved: tuple, gradients: tuple) -> tuple:
    return _gradients(options, saved, *gradients)


@dataclass(frozen=True)
class NormGradientsRequest:
    """Arguments of a norm's backward pass, as its backends receive them.

    Attributes:
        options: arguments of the norm.
        x, d_out: [..., D].
        weight, bias: [D], or None.
        d_residual: gradient of x from the residual branch [..., D], or None.
    """

    options: NormOptions
    x: jax.Array
    weight: jax.Array | None
    bias: jax.Array | None
    d_out: jax.Array
    d_residual: jax.Array | None

    def __str__(self) -> str:
        kind = "layer" if self.options.centered else "rms"
        return f"{kind} norm of {list(self.x.shape)} {self.x.dtype.name} on {current_target()}"


def _gradients(options: NormOptions, saved: tuple, d_out: jax.Array, d_residual: jax.Array | None) -> tuple:
    """Return the gradients of x, weight and bias; `d_residual` is the gradient of x from the residual branch."""
    x, weight, bias = saved
    request = NormGradientsRequest(options, x, weight, bias, d_out, d_residual)
    return select("norm_gradients", _BACKENDS, None, request).call(request)


def _triton_gradients(request: NormGradientsRequest) -> tuple:
    options = request.options
    x = request.x
    weight = request.weight
    bias = request.bias
    assert weight is not None
    gain = weight.astype(jnp.float32) + options.offset
    d_x, sums = norm_triton.gradients(x, gain, request.d_out, request.d_residual, options.epsilon, options.centered)
    return d_x, sums[0].astype(weight.dtype), None if bias is None else sums[1].astype(bias.dtype)


def _xla_gradients(request: NormGradientsRequest) -> tuple:
    options = request.options
    bias = request.bias
    d_residual = request.d_residual
    # The barrier prevents XLA from sharing sums with the forward, whose one kernel it would then split into several.
    x, weight = jax.lax.optimization_barrier((request.x, request.weight))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    d_out = request.d_out.astype(wide.dtype)
    rows = tuple(range(x.ndim - 1))

    def average(values):
        return jnp.mean(values, axis=-1, keepdims=True)

    scaled = d_out if weight is None else d_out * (weight.astype(wide.dtype) + options.offset)
    square = average(jnp.square(wide))
    along = average(scaled * wide)
    if options.centered:
        mean = average(wide)
        ones = average(scaled)
        square = jnp.maximum(square - mean * mean, 0)
        along = along - mean * ones
        wide = wide - mean
        scaled = scaled - ones
    inverse = jax.lax.rsqrt(square + options.epsilon)
    d_x = inverse * (scaled - wide * (along * jnp.square(inverse)))
    d_x = (d_x if d_residual is None else d_x + d_residual.astype(d_x.dtype)).astype(x.dtype)
    d_weight = None if weight is None else (d_out * (wide * inverse)).sum(axis=rows).astype(weight.dtype)
    return d_x, d_weight, None if bias is None else d_out.sum(axis=rows).astype(bias.dtype)


def _unsupported_by_triton(request: NormGradientsRequest) -> str | None:
    return "needs a weight" if request.weight is None else norm_triton.unsupported_reason(request.x)


def _triton_lower_priority(request: NormGradientsRequest) -> str | None:
    return norm_triton.lower_priority_reason(request.x)


_BACKENDS = (
    Backend(
        "triton",
        "reads every array once",
        _unsupported_by_triton,
        _triton_gradients,
        _triton_lower_priority,
        opaque=True,
    ),
    Backend("xla", "two passes, on every device", lambda _: None, _xla_gradients),
)


_normalise.defvjp(_forward_rule, _backward_rule)
_normalise_and_return_input.defvjp(_forward_rule_with_input, _backward_rule_with_input)
