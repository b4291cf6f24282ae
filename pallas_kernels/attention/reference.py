"""Softmax attention written out: the definition that every backend is tested against.

It materialises the whole [B, N, T, S] score matrix in float32 (float64 for float64 inputs) and is differentiated by
jax.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention.request import AttentionRequest


def attend(request: AttentionRequest) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention from the full score matrix: return out [B, T, N, H] and the log-sum-exp [B, N, T].

    `out` has the dtype of q; the log-sum-exp is a natural logarithm in float32.

    A query that sees no key gets the output 0 and the log-sum-exp -inf.
    """
    dtype = jnp.promote_types(request.q.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (request.q, request.k, request.v))
    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * request.options.scale
    if request.options.soft_cap is not None:
        scores = request.options.soft_cap * jnp.tanh(scores / request.options.soft_cap)
    visible = _visible(request)
    if request.sinks is not None:  # One more key, which every query sees, with the value 0.
        column = jnp.broadcast_to(request.sinks.astype(dtype)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
        v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    # A row without a visible key would compute exp(-inf - -inf): its softmax is that of zeros, and then dropped.
    any_visible = visible.any(axis=-1, keepdims=True)
    scores = jnp.where(visible, scores, jnp.where(any_visible, -jnp.inf, 0.0))
    weights = jnp.where(any_visible, jax.nn.softmax(scores, axis=-1), 0.0)
    lse = jnp.where(any_visible[..., 0], jax.nn.logsumexp(scores, axis=-1), -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")
    return out.astype(request.q.dtype), lse


def _visible(request: AttentionRequest) -> Bool[Array, "_ 1 T S"]:
    """Return which keys each query sees under mask and segments, boolean [B or 1, 1, T, S]."""
    length = request.query_length
    key_length = request.key_length
    mask = request.options.mask
    segments = request.segments
    positions = jnp.arange(length) + key_length - length
    key_positions = jnp.arange(key_length)
    visible = mask.visible(positions, key_positions, segments.global_tokens(mask) if segments is not None else None)
    visible = jnp.ones((1, length, key_length), bool) if visible is None else visible.reshape(-1, length, key_length)
    if segments is not None:
        visible = visible & (segments.query[:, :, None] == segments.key[:, None, :])
    return visible[:, None]
