"""Linear attention in chunks: masked matmuls within a chunk, a recurrent state between chunks; linear time and memory.

out_t = sum_s w_s (phi(q_t) . phi(k_s)) v_s / sum_s w_s phi(q_t) . phi(k_s), over the keys s that query t sees. All
chunks are computed in parallel; only their states depend on one another, and a tree combines them. Sums are float32.

Dims: n chunks of C tokens, G = N // K query heads per key head. Heads and chunks lead, as in a batched matmul.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear_time_attention.request import LinearAttentionRequest
from pallas_kernels.linear_time_attention.state import EMPTY, LinearState
from pallas_kernels.sequence_parts import in_chunks

_SHORTEST_CHUNK = 64
_LONGEST_CHUNK = 256
_TINY = 1e-30


class _Chunks(NamedTuple):
    """Features of queries and keys, values and documents of a sequence that is cut into n chunks of tokens.

    Keys that no query sees have features 0 and the weight `EMPTY`.
    """

    query: jax.Array  # [B, K, n, G, C, F]
    key: jax.Array  # [B, K, n, C, F]
    log_weight: jax.Array | None  # [B, K, n, C], of keys
    v: jax.Array  # [B, K, n, C, H]
    documents: jax.Array | None  # [B, 1, n, C]


class _StateBefore(NamedTuple):
    """The recurrent state before each chunk of tokens, and which of the chunk's tokens may use it."""

    state: LinearState  # [B, K, n, ...]
    seen: jax.Array | None  # boolean [B, 1, n, C]; None where all


def unsupported_reason(request: LinearAttentionRequest) -> str | None:
    """Return None, as this backend computes every call of linear attention."""
    del request
    return None


def attend(request: LinearAttentionRequest) -> tuple[Float[Array, "B T N H"], LinearState | None]:
    """Return linear attention [B, T, N, H], by chunks, and if causal the recurrent state after the last token."""

    def compute(
        q: jax.Array, k: jax.Array, v: jax.Array, state: LinearState | None
    ) -> tuple[jax.Array, LinearState | None]:
        chunks = _cut(request, q, k, v)
        last = None
        if not request.causal and request.documents is None:
            out = _attend_all(chunks)
        else:
            before, last = _states(chunks, state)
            befores = [before]
            if not request.causal:
                befores.append(_flip_before(_states(_flip(chunks), None)[0]))
            out = _outputs(chunks, befores, request.causal)
        out = jnp.moveaxis(out, (2, 4), (1, 2))
        return out.reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]].astype(q.dtype), last

    # The backward recomputes features, scores and states: saved, they would be many times the size of q, k and v.
    return jax.checkpoint(compute)(request.q, request.k, request.v, request.state)


def _cut(request: LinearAttentionRequest, q: jax.Array, k: jax.Array, v: jax.Array) -> _Chunks:
    """Return the features of queries and keys, the values and the documents, all cut into chunks of tokens.

    If every query sees all keys, there is one chunk, whose numbers of queries and keys may differ.
    """
    features = jax.eval_shape(request.feature_map.key, k).values.shape[-1]
    if request.causal or request.documents is not None:
        chunk = query_chunk = min(request.chunk or _chunk(features, v.shape[-1]), q.shape[1])
    else:
        chunk = k.shape[1]
        query_chunk = q.shape[1]
    # On a CPU XLA does not support some of the matmuls in bfloat16.
    dtype = jnp.promote_types(v.dtype, jnp.float32) if request.target.platform == "cpu" else v.dtype
    q = in_chunks(q, query_chunk).reshape(q.shape[0], -1, query_chunk, k.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    k = in_chunks(k, chunk)
    v = in_chunks(v, chunk)
    key = request.feature_map.key(jnp.moveaxis(k, 3, 1))
    query = request.feature_map.query(jnp.moveaxis(q, (3, 4), (1, 3))).values
    counted = _counting(request, chunk)
    values = key.values
    log_weight = key.log_weight
    if counted is not None:
        values = jnp.where(counted[..., None], values, 0)
        log_weight = None if log_weight is None else jnp.where(counted, log_weight, EMPTY)
    # Without the barrier XLA also stores the features in float32.
    query, values = jax.lax.optimization_barrier((query, values))
    documents = request.documents
    return _Chunks(
        query.astype(dtype),
        values.astype(dtype),
        log_weight,
        jnp.moveaxis(v, 3, 1).astype(dtype),
        None if documents is None else in_chunks(documents, chunk, "edge")[:, None],
    )


def _chunk(features: int, head_dim: int) -> int:
    """Return how many tokens a chunk should have: the power of two that minimises time.

    Scores within chunks take T x C numbers, states T / C x F x H.
    """
    balanced = 2 ** round(math.log2(math.sqrt(features * head_dim)))
    return max(_SHORTEST_CHUNK, min(_LONGEST_CHUNK, balanced))


def _counting(request: LinearAttentionRequest, chunk: int) -> jax.Array | None:
    """Return a mask [B or 1, 1, chunks, keys], False for padding and keys that no query sees; None if all are True."""
    length = request.k.shape[1]
    if request.hidden is None and length % chunk == 0:
        return None
    counted = jnp.ones((1, length), bool) if request.hidden is None else ~request.hidden
    return in_chunks(counted, chunk)[:, None]


def _states(chunks: _Chunks, start: LinearState | None) -> tuple[_StateBefore, LinearState]:
    """Return the recurrent state before each chunk of tokens, and the state after the last chunk."""
    dtype = jnp.promote_types(chunks.v.dtype, jnp.float32)
    batch, heads, count, _, features = chunks.key.shape
    in_last_document = None
    continues = jnp.ones((batch, 1, count), bool)
    seen = None
    if chunks.documents is not None:
        first = chunks.documents[..., 0]
        last = chunks.documents[..., -1]
        previous = jnp.concatenate([first[..., :1], last[..., :-1]], axis=-1)
        in_last_document = chunks.documents == last[..., None]
        continues = (first == last) & (first == previous)
        seen = chunks.documents == previous[..., None]
    log_scale = jnp.zeros((batch, heads, count), dtype)
    weight = None
    if chunks.log_weight is not None:
        weight = (
            chunks.log_weight if in_last_document is None else jnp.where(in_last_document, chunks.log_weight, EMPTY)
        )
        log_scale = weight.max(axis=-1)
        weight = jnp.exp(weight - log_scale[..., None])
    if in_last_document is not None:
        weight = in_last_document.astype(dtype) if weight is None else jnp.where(in_last_document, weight, 0.0)
    # The weights multiply values and not keys: there are fewer values than features.
    key = chunks.key.astype(dtype)
    v = chunks.v
    if weight is not None:
        key = key * weight[..., None]
        v = (v * weight[..., None]).astype(v.dtype)
    new = LinearState(
        jnp.einsum("bkncf,bknch->bknfh", chunks.key, v, preferred_element_type=dtype), key.sum(axis=-2), log_scale
    )
    if start is None:
        shape = (batch, heads, features, chunks.v.shape[-1])
        start = LinearState(jnp.zeros(shape, dtype), jnp.zeros(shape[:3], dtype), jnp.full(shape[:2], EMPTY, dtype))
    start = LinearState(*(x.astype(dtype) for x in start))
    start = start._replace(log_scale=jax.lax.stop_gradient(start.log_scale))
    decay = jnp.broadcast_to(jnp.where(continues, 0.0, EMPTY).astype(dtype), log_scale.shape)
    before = _before_each(new, decay, start)
    last = _combine_states(*(jax.tree.map(lambda x: x[:, :, -1], tree) for tree in (before, new, decay)))
    return _StateBefore(before, seen), last


def _before_each(new: LinearState, decay: jax.Array, start: LinearState) -> LinearState:
    """Return the recurrent state before each of n chunks, [B, K, n, ...], from the sums that each chunk adds.

    Each chunk multiplies the state by exp(decay) and adds `new`. Neighbours are combined and the pairs solved first:
    2 log2(n) steps over arrays that halve. (XLA crashes on the empty arrays in the gradient of
    `jax.lax.associative_scan` in a `shard_map` inside a loop over layers.)
    """
    count = decay.shape[2]
    if count == 1:
        return jax.tree.map(lambda x: x[:, :, None], start)
    if count % 2:
        new, decay = jax.tree.map(
            lambda x: jnp.pad(x, [(0, 1) if dim == 2 else (0, 0) for dim in range(x.ndim)]), (new, decay)
        )
    (first, decay_first), (second, decay_second) = (
        jax.tree.map(lambda x, i=i: x[:, :, i::2], (new, decay)) for i in range(2)
    )
    before = _before_each(_combine_states(first, second, decay_second), decay_first + decay_second, start)
    between = _combine_states(before, first, decay_first)

    def interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
        both = jnp.stack([even, odd], axis=3)
        return both.reshape(*even.shape[:2], -1, *even.shape[3:])[:, :, :count]

    return jax.tree.map(interleave, before, between)


def _combine_states(state: LinearState, new: LinearState, decay: jax.Array) -> LinearState:
    """Return state * exp(decay) + new, for two recurrent states, stored with the larger of their scales."""
    log_scale = jnp.maximum(state.log_scale + decay, new.log_scale)
    old_scale = jnp.exp(state.log_scale + decay - log_scale)
    new_scale = jnp.exp(new.log_scale - log_scale)
    return LinearState(
        state.values * old_scale[..., None, None] + new.values * new_scale[..., None, None],
        state.normalizer * old_scale[..., None] + new.normalizer * new_scale[..., None],
        log_scale,
    )


def _outputs(chunks: _Chunks, befores: list[_StateBefore], causal: bool) -> jax.Array:
    """Return attention of each chunk's queries to its keys and to the states `befores`, float32 [B, K, n, G, C, H]."""
    dtype = jnp.promote_types(chunks.v.dtype, jnp.float32)
    # The scores are rounded before both sums, as in any flash attention, so that the sums agree.
    rounded = dtype if chunks.v.dtype == jnp.float16 else chunks.v.dtype
    scores = jnp.einsum("bkngif,bknjf->bkngij", chunks.query, chunks.key, preferred_element_type=rounded)
    visible = jnp.ones((1, 1, 1, scores.shape[-1], scores.shape[-1]), bool)
    if causal:
        visible = jnp.tril(visible)
    if chunks.documents is not None:
        visible = visible & (chunks.documents[..., :, None] == chunks.documents[..., None, :])
    largest = None
    if chunks.log_weight is not None:
        weight = jnp.where(visible, chunks.log_weight[..., None, :], EMPTY)
        largest = weight.max(axis=-1)
        for before in befores:
            largest = jnp.maximum(largest, _where_seen(before, before.state.log_scale[..., None], EMPTY))
        scores = scores * jnp.exp(weight - largest[..., None])[:, :, :, None]
    scores = jnp.where(visible[:, :, :, None], scores, 0)
    total = scores.sum(axis=-1, dtype=dtype)
    out = jnp.einsum("bkngij,bknjh->bkngih", scores.astype(chunks.v.dtype), chunks.v, preferred_element_type=dtype)
    for before in befores:
        share = jnp.ones((1,) * 4, dtype)
        if largest is not None:
            share = jnp.exp(_where_seen(before, before.state.log_scale[..., None], EMPTY) - largest)
        share = _where_seen(before, share, 0.0)[:, :, :, None]
        added, added_total = _multiply(chunks.query, before.state)
        out = out + share[..., None] * added
        total = total + share * added_total
    return _normalise(out, total)


def _where_seen(before: _StateBefore, x: jax.Array, otherwise: float) -> jax.Array:
    """Return x [B, K, n, C] with `otherwise` for tokens that may not use the recurrent state before their chunk."""
    return x if before.seen is None else jnp.where(before.seen, x, otherwise)


def _attend_all(chunks: _Chunks) -> jax.Array:
    """Compute linear attention in which every query sees all keys, as one chunk: [B, K, 1, G, T, H] in float32."""
    _, state = _states(chunks, None)
    return _normalise(*_multiply(chunks.query, jax.tree.map(lambda x: x[:, :, None], state)))


def _multiply(query: jax.Array, state: LinearState) -> tuple[jax.Array, jax.Array]:
    """Return numerator and denominator of the queries' attention to the state: sums of weighted values, and of weights.

    Returns [B, K, n, G, C, H], and the sums of the similarities [B, K, n, G, C].
    """
    wide = state.values.dtype
    # Sums over all keys may overflow float16.
    dtype = wide if query.dtype == jnp.float16 else query.dtype
    values = state.values.astype(dtype)
    out = jnp.einsum("bkngif,bknfh->bkngih", query.astype(dtype), values, preferred_element_type=wide)
    return out, (query.astype(wide) * state.normalizer[:, :, :, None, None]).sum(axis=-1)


def _normalise(out: jax.Array, total: jax.Array) -> jax.Array:
    """Divide outputs by the sums of their similarities, giving 0 where the sum is not greater than 0."""
    positive = total > _TINY
    # Scaled first: the derivative of 1 / total contains a square, which would overflow.
    scale = jax.lax.stop_gradient(jnp.where(positive, 1.0 / jnp.where(positive, total, 1.0), 0.0))
    return out * scale[..., None] / jnp.where(positive, total * scale, 1.0)[..., None]


def _flip(chunks: _Chunks) -> _Chunks:
    """Reverse the order of the tokens of all chunks."""
    flipped = jax.tree.map(lambda x: jnp.flip(x, axis=(2, 3)), chunks)
    return flipped._replace(query=jnp.flip(chunks.query, axis=(2, 4)))


def _flip_before(before: _StateBefore) -> _StateBefore:
    state = jax.tree.map(lambda x: jnp.flip(x, axis=2), before.state)
    return _StateBefore(state, None if before.seen is None else jnp.flip(before.seen, axis=(2, 3)))
