"""Attention for short sequences: a few static blocks of query rows, each against all keys that it can see.

Each block needs one softmax instead of the online one, so nothing is rescaled. Keys that no query of the block can see
are sliced away while tracing, which for a causal mask saves nearly half of the work. The backward recomputes the
softmax weights from the log-sum-exp; on a CPU, where memory is cheap compared to arithmetic, it saves them instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention import scores as pieces
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import AttentionRequest, Gradients, Options, Segments
from pallas_kernels.attention.visible_tiles import Blocks, possible_tiles

LONGEST = 1024
_SMALLEST_BLOCK = 32
_MOST_BLOCKS = 4


class _Block(NamedTuple):
    """A block of query rows [start, stop), and the range of keys [first_key, last_key) that they see."""

    start: int
    stop: int
    first_key: int
    last_key: int


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return None, as this backend computes every attention call, with memory in proportion to T x S."""
    del request
    return None


def lower_priority_reason(request: AttentionRequest) -> str | None:
    """Return why the XLA backend with linear memory is preferred (the sequences are long), or None."""
    if max(request.query_length, request.key_length) > LONGEST:
        return (
            f"stores the score matrix: for lengths to {LONGEST}, got T {request.query_length}, S {request.key_length}"
        )
    return None


def attend(request: AttentionRequest) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention from few large score matrices: return out [B, T, N, H] and the log-sum-exp [B, N, T]."""
    save_weights = request.target.platform == "cpu"
    out, lse = _differentiable(request.options, save_weights, request.q, request.k, request.v, request.segments)
    return pieces.with_sinks(out, lse, request.sinks)


def gradients(
    request: AttentionRequest, d_out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Gradients:
    """Compute dQ, dK and dV of attention to a part of the keys, given row statistics (lse, delta) over all keys."""
    rows = d_out, lse, delta
    return _gradients(request.options, request.q, request.k, request.v, request.segments, rows, None)


def _attend(
    options: Options, save_weights: bool, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    out, lse, _ = _forward(options, q, k, v, segments)
    return out, lse


def _blocks(mask: Mask, length: int, key_length: int, segmented: bool) -> list[_Block]:
    size = length
    if mask != Mask(causal=False):
        size = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS))
    blocks = []
    for index, row in enumerate(possible_tiles(mask, Blocks(length, key_length, size, 1), segmented)):
        # A block that sees no key still gets one, which is masked.
        seen = np.flatnonzero(row) if row.any() else np.zeros(1, int)
        stop = min((index + 1) * size, length)
        blocks.append(_Block(index * size, stop, int(seen[0]), int(seen[-1]) + 1))
    return blocks


def _masked_scores(options: Options, block: _Block, q: jax.Array, k: jax.Array, segments: Segments | None) -> jax.Array:
    """Return the attention scores [B, K, G, rows, keys] of one block of queries, -inf for hidden keys."""
    offset = k.shape[1] - q.shape[1]
    rows = slice(block.start, block.stop)
    keys = slice(block.first_key, block.last_key)
    scores = pieces.raw_scores(q[:, rows], k[:, keys], options)
    is_global = segments.global_tokens(options.mask) if segments is not None else None
    visible = options.mask.visible(
        jnp.arange(block.start, block.stop) + offset,
        jnp.arange(block.first_key, block.last_key),
        None if is_global is None else (is_global[0][:, rows], is_global[1][:, keys]),
    )
    if segments is not None:
        same = segments.query[:, rows, None] == segments.key[:, None, keys]
        visible = same if visible is None else visible & same
    if visible is None:
        return scores
    visible = visible[:, None, None] if visible.ndim == 3 else visible
    # On a CPU, adding a bias was measured to be faster than selecting.
    return scores + jnp.where(visible, 0.0, -jnp.inf).astype(scores.dtype)


def _forward(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Compute attention: return out [B, T, N, H], lse [B, N, T] and, for the backward, each block's softmax weights."""
    grouped = pieces.group_heads(q, k.shape[2])
    rows_may_be_empty = segments is not None or q.shape[1] > k.shape[1] or options.mask.layout is not None
    outs = []
    lses = []
    saved_weights = []
    for block in _blocks(options.mask, q.shape[1], k.shape[1], segments is not None):
        scores = _masked_scores(options, block, grouped, k, segments)
        maximum = scores.max(axis=-1)
        if rows_may_be_empty:
            maximum = pieces.finite_or_zero(maximum)
        weights = jnp.exp(scores - maximum[..., None])
        total = weights.sum(axis=-1)
        lses.append(maximum + jnp.log(total))
        weights = weights / (jnp.where(total == 0.0, 1.0, total) if rows_may_be_empty else total)[..., None]
        outs.append(pieces.weighted_sum_of_values(weights, v[:, block.first_key : block.last_key]).astype(q.dtype))
        saved_weights.append(weights)
    out = jnp.concatenate(outs, axis=1).reshape(q.shape)
    lse = jnp.concatenate(lses, axis=-1)
    return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1]), saved_weights


def _forward_rule(
    options: Options, save_weights: bool, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple:
    out, lse, weights = _forward(options, q, k, v, segments)
    out, lse = name_outputs(out, lse)
    return (out, lse), (q, k, v, segments, out, lse, weights if save_weights else None)


def _backward_rule(options: Options, save_weights: bool, residuals: tuple, cotangents: tuple) -> tuple:
    del save_weights
    q, k, v, segments, out, lse, saved_weights = residuals
    d_out, d_lse = cotangents
    if pieces.needs_delta_correction(q.dtype):
        rows = d_out, lse, pieces.row_delta(out, d_out, jnp.zeros_like(d_lse))
        return *_gradients(options, q, k, v, segments, rows, saved_weights, d_lse), None
    rows = d_out, lse, pieces.row_delta(out, d_out, d_lse)
    return *_gradients(options, q, k, v, segments, rows, saved_weights), None


def _gradients(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    row_statistics: tuple,
    saved_weights: list[jax.Array] | None,
    d_lse: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute dQ, dK and dV of attention from q, k, v and `row_statistics`, which are (d_out, lse, delta).

    Args:
        row_statistics: (d_out, lse, delta).
        saved_weights: the softmax weights of each block, or None to recompute them.
        d_lse: the gradient of the log-sum-exp if `delta` does not contain it and is to be corrected, else None.
    """
    d_out, lse, delta = row_statistics
    dtype = pieces.accumulator_dtype(q.dtype)
    num_kv_heads = k.shape[2]
    delta = delta.reshape(_grouped_rows(q, k))
    lse = pieces.finite_or_zero(lse).reshape(_grouped_rows(q, k))
    grouped = pieces.group_heads(q, num_kv_heads)
    d_grouped = pieces.group_heads(d_out, num_kv_heads)
    d_q = []
    d_k = jnp.zeros(k.shape, dtype)
    d_v = jnp.zeros(v.shape, dtype)
    for index, block in enumerate(_blocks(options.mask, q.shape[1], k.shape[1], segments is not None)):
        rows = slice(block.start, block.stop)
        keys = slice(block.first_key, block.last_key)
        if saved_weights is None or options.soft_cap is not None:
            scores = _masked_scores(options, block, grouped, k, segments)
            weights = jnp.exp(scores - lse[..., rows, None])
        else:
            scores = None
            weights = saved_weights[index]
        d_weights = jnp.einsum("btkgh,bskh->bkgts", d_grouped[:, rows], v[:, keys], preferred_element_type=dtype)
        delta_rows = delta[..., rows]
        if d_lse is not None:
            d_weights -= delta_rows[..., None]
            weights = weights / pieces.one_if_zero(weights.sum(axis=-1))[..., None]
            delta_rows = (weights * d_weights).sum(axis=-1) - d_lse.reshape(delta.shape)[..., rows]
        gradient = pieces.score_gradient(weights, d_weights, delta_rows, scores, options)
        d_q.append(pieces.weighted_sum_of_values(gradient, k[:, keys]).astype(q.dtype))
        padding = ((0, 0), (block.first_key, k.shape[1] - block.last_key), (0, 0), (0, 0))
        d_k += jnp.pad(pieces.sum_over_queries(gradient, grouped[:, rows]), padding)
        d_v += jnp.pad(pieces.sum_over_queries(weights, d_grouped[:, rows]), padding)
    return jnp.concatenate(d_q, axis=1).reshape(q.shape), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _grouped_rows(q: jax.Array, k: jax.Array) -> tuple[int, int, int, int]:
    return (q.shape[0], k.shape[2], q.shape[2] // k.shape[2], q.shape[1])


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0, 1))
_differentiable.defvjp(_forward_rule, _backward_rule)
