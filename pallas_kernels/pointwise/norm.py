"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), optionally with the residual addition before it."""

import functools

import jax
import jax.numpy as jnp


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset) over the last dim, computed in float32.

    Only x is kept for the backward.

    Args:
        x: [..., D].
        weight: [D]; None for no scale.
        residual: [..., D]; where given, x + residual is normalised and also returned.
        epsilon: added to the mean square.
        weight_offset: 1.0 for Gemma, whose weights are stored less one.

    Returns:
        The normalised [..., D] in the dtype of x; with `residual` the pair (normalised, x + residual).

    Raises:
        ValueError: the shapes do not fit.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {list(x.shape[-1:])}, the last dim of x; got {list(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {list(x.shape)}; got {list(residual.shape)}")
    if residual is None:
        return _normalise(epsilon, weight_offset, x, weight)
    total = x + residual
    return _normalise(epsilon, weight_offset, total, weight), total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalise(epsilon: float, offset: float, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    return _forward_rule(epsilon, offset, x, weight)[0]


def _forward_rule(epsilon: float, offset: float, x: jax.Array, weight: jax.Array | None) -> tuple:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    out = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    if weight is not None:
        out = out * (weight.astype(wide.dtype) + offset)
    return out.astype(x.dtype), (x, weight)


def _backward_rule(epsilon: float, offset: float, residuals: tuple, d_out: jax.Array) -> tuple:
    # A use of the forward's sums here would split its one kernel into three. Both sums here are of one pass.
    x, weight = jax.lax.optimization_barrier(residuals)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    d_out = d_out.astype(wide.dtype)
    gain = 1.0 if weight is None else weight.astype(wide.dtype) + offset
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    along = (d_out * gain * wide).mean(axis=-1, keepdims=True)
    d_weight = None
    if weight is not None:
        d_weight = (d_out * (wide * inverse)).sum(axis=tuple(range(x.ndim - 1))).astype(weight.dtype)
    return (inverse * (d_out * gain - wide * (along * jnp.square(inverse)))).astype(x.dtype), d_weight


_normalise.defvjp(_forward_rule, _backward_rule)
