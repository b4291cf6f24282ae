"""Linear attention in chunks: masked products inside a chunk, a state between chunks; time and memory linear in T.

out_t = sum_s w_s (phi(q_t) . phi(k_s)) v_s / sum_s w_s phi(q_t) . phi(k_s), over the keys s that t sees. The chunks are
computed side by side; only their states depend on one another, and these are joined as a tree. All sums are float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.scores import group_heads
from pallas_kernels.feature_attention.request import Request
from pallas_kernels.feature_attention.state import EMPTY, LinearState

_SHORTEST_CHUNK, _LONGEST_CHUNK = 64, 256
_TINY = 1e-30


class _Chunks(NamedTuple):
    """The tokens of n chunks of C. Queries are grouped by key head."""

    query: jax.Array  # [B, n, C, K, G, F]
    key: jax.Array  # [B, n, C, K, F]
    log_weight: jax.Array | None  # [B, n, C, K], of keys
    v: jax.Array  # [B, n, C, K, H]
    documents: jax.Array | None  # [B, n, C]


class _Before(NamedTuple):
    """What each chunk finds: the state of the chunks before it, and which of its tokens that state belongs to."""

    state: LinearState  # [B, n, K, ...]
    seen: jax.Array | None  # boolean [B, n, C]; None where all


def refuses(request: Request) -> str | None:
    """Nothing: this backend computes every call."""
    del request
    return None


def attend(request: Request) -> tuple[jax.Array, LinearState | None]:
    """out [B, T, N, H], and the state after the last token where `request.causal`."""

    def compute(
        q: jax.Array, k: jax.Array, v: jax.Array, state: LinearState | None
    ) -> tuple[jax.Array, LinearState | None]:
        query, key = request.features(q, k)
        # On a CPU XLA refuses to run some of these products in bfloat16.
        dtype = jnp.promote_types(v.dtype, jnp.float32) if request.target.platform == "cpu" else v.dtype
        query, keys, v = group_heads(query, k.shape[2]).astype(dtype), key.values.astype(dtype), v.astype(dtype)
        if not request.causal and request.documents is None:
            return _attend_all(query, keys, key.log_weight, v).reshape(q.shape).astype(q.dtype), None
        chunk = min(request.chunk or _chunk(query.shape[-1], v.shape[-1]), q.shape[1])
        chunks = _cut(_Chunks(query, keys, key.log_weight, v, request.documents), chunk)
        before, last = _states(chunks, state)
        befores = [before]
        if not request.causal:
            befores.append(_flip_before(_states(_flip(chunks), None)[0]))
        out = _outputs(chunks, befores, request.causal)
        return out.reshape(q.shape[0], -1, *q.shape[2:])[:, : q.shape[1]].astype(q.dtype), last

    # The backward computes features, scores and states again: kept, they would be many times the size of q, k and v.
    return jax.checkpoint(compute)(request.q, request.k, request.v, request.state)


def _chunk(features: int, head_dim: int) -> int:
    """Scores inside of chunks take T x C, states T / C x F x H numbers: the power of two with the least of both."""
    balanced = 2 ** round(math.log2(math.sqrt(features * head_dim)))
    return max(_SHORTEST_CHUNK, min(_LONGEST_CHUNK, balanced))


def _cut(tokens: _Chunks, chunk: int) -> _Chunks:
    """[B, T, ...] -> [B, n, C, ...]; tokens that fill up the last chunk count for nothing."""
    missing = -tokens.v.shape[1] % chunk

    def cut(x: jax.Array, **padding: Any) -> jax.Array:
        if missing:
            x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), **padding)
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])

    return _Chunks(
        cut(tokens.query),
        cut(tokens.key),
        None if tokens.log_weight is None else cut(tokens.log_weight, constant_values=EMPTY),
        cut(tokens.v),
        None if tokens.documents is None else cut(tokens.documents, mode="edge"),
    )


def _states(chunks: _Chunks, start: LinearState | None) -> tuple[_Before, LinearState]:
    """The state before each chunk, and after the last."""
    dtype = jnp.promote_types(chunks.v.dtype, jnp.float32)
    batch, count, _, heads, features = chunks.key.shape
    own, keeps, seen = None, jnp.ones((batch, count, 1), bool), None
    if chunks.documents is not None:
        first, last = chunks.documents[:, :, 0], chunks.documents[:, :, -1]
        previous = jnp.concatenate([first[:, :1], last[:, :-1]], axis=1)
        own = (chunks.documents == last[..., None])[..., None]
        keeps = ((first == last) & (first == previous))[..., None]
        seen = chunks.documents == previous[..., None]
    log_scale, key = jnp.zeros((batch, count, heads), dtype), chunks.key
    if chunks.log_weight is not None:
        weight = chunks.log_weight if own is None else jnp.where(own, chunks.log_weight, EMPTY)
        log_scale = weight.max(axis=2)
        key = (key * jnp.exp(weight - log_scale[:, :, None])[..., None]).astype(key.dtype)
    if own is not None:
        key = jnp.where(own[..., None], key, 0)
    new = LinearState(
        jnp.einsum("bnckf,bnckh->bnkfh", key, chunks.v, preferred_element_type=dtype),
        key.sum(axis=2, dtype=dtype),
        log_scale,
    )
    if start is None:
        shape = (batch, heads, features, chunks.v.shape[-1])
        start = LinearState(jnp.zeros(shape, dtype), jnp.zeros(shape[:3], dtype), jnp.full(shape[:2], EMPTY, dtype))
    start = LinearState(*(x.astype(dtype) for x in start))
    start = start._replace(log_scale=jax.lax.stop_gradient(start.log_scale))
    decay = jnp.broadcast_to(jnp.where(keeps, 0.0, EMPTY).astype(dtype), log_scale.shape)
    before = _before_each(new, decay, start)
    last = _absorb(*(jax.tree.map(lambda x: x[:, -1], tree) for tree in (before, new, decay)))
    return _Before(before, seen), last


def _before_each(new: LinearState, decay: jax.Array, start: LinearState) -> LinearState:
    """The state before each of n chunks, [B, n, K, ...], of which each adds `new` and leaves exp(decay) of it.

    Neighbours are joined and the pairs solved first: 2 log2(n) steps over arrays that halve. (XLA crashes on the empty
    arrays of `jax.lax.associative_scan`'s gradient in a `shard_map` inside of a loop over layers.)
    """
    count = decay.shape[1]
    if count == 1:
        return jax.tree.map(lambda x: x[:, None], start)
    if count % 2:
        new, decay = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2))), (new, decay))
    (first, decay_first), (second, decay_second) = (
        jax.tree.map(lambda x, i=i: x[:, i::2], (new, decay)) for i in range(2)
    )
    before = _before_each(_absorb(first, second, decay_second), decay_first + decay_second, start)
    between = _absorb(before, first, decay_first)

    def interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
        both = jnp.stack([even, odd], axis=2)
        return both.reshape(even.shape[0], -1, *even.shape[2:])[:, :count]

    return jax.tree.map(interleave, before, between)


def _absorb(state: LinearState, new: LinearState, decay: jax.Array) -> LinearState:
    """exp(decay) times one state plus another, in the larger of their scales."""
    log_scale = jnp.maximum(state.log_scale + decay, new.log_scale)
    keep, add = jnp.exp(state.log_scale + decay - log_scale), jnp.exp(new.log_scale - log_scale)
    return LinearState(
        state.values * keep[..., None, None] + new.values * add[..., None, None],
        state.normalizer * keep[..., None] + new.normalizer * add[..., None],
        log_scale,
    )


def _outputs(chunks: _Chunks, befores: list[_Before], causal: bool) -> jax.Array:
    """[B, n, C, K, G, H] in float32."""
    dtype = jnp.promote_types(chunks.v.dtype, jnp.float32)
    scores = jnp.einsum("bnikgf,bnjkf->bnkgij", chunks.query, chunks.key, preferred_element_type=dtype)
    length = scores.shape[-1]
    visible = jnp.ones((1, 1, length, length), bool)
    if causal:
        visible = jnp.tril(visible)
    if chunks.documents is not None:
        visible = visible & (chunks.documents[..., :, None] == chunks.documents[..., None, :])
    visible = visible[:, :, None]
    largest = None
    if chunks.log_weight is not None:
        weight = jnp.where(visible, jnp.moveaxis(chunks.log_weight, 2, 3)[..., None, :], EMPTY)
        largest = weight.max(axis=-1)
        for before in befores:
            largest = jnp.maximum(largest, _where_seen(before, before.state.log_scale[..., None], EMPTY))
        scores = scores * jnp.exp(weight - largest[..., None])[:, :, :, None]
    scores = jnp.where(visible[:, :, :, None], scores, 0)
    total = jnp.moveaxis(scores.sum(axis=-1), -1, 2)
    out = jnp.einsum("bnkgij,bnjkh->bnikgh", scores.astype(chunks.v.dtype), chunks.v, preferred_element_type=dtype)
    for before in befores:
        state = before.state
        share = jnp.ones((1,) * 4, dtype) if largest is None else jnp.exp(state.log_scale[..., None] - largest)
        share = jnp.moveaxis(_where_seen(before, share, 0.0), -1, 2)[..., None]
        query, values = _multiplied(chunks.query, state.values)
        added = jnp.einsum("bnikgf,bnkfh->bnikgh", query, values, preferred_element_type=dtype)
        out = out + share[..., None] * added
        total = total + share * (chunks.query.astype(dtype) * state.normalizer[:, :, None, :, None]).sum(axis=-1)
    return _normalise(out, total)


def _where_seen(before: _Before, x: jax.Array, otherwise: float) -> jax.Array:
    """x [B, n, K, C], or broadcast to it, for the tokens that the state belongs to."""
    return x if before.seen is None else jnp.where(before.seen[:, :, None], x, otherwise)


def _attend_all(query: jax.Array, key: jax.Array, log_weight: jax.Array | None, v: jax.Array) -> jax.Array:
    """All keys for all queries: [B, T, K, G, H] in float32."""
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    if log_weight is not None:
        key = (key * jnp.exp(log_weight - log_weight.max(axis=1, keepdims=True))[..., None]).astype(key.dtype)
    values = jnp.einsum("bskf,bskh->bkfh", key, v, preferred_element_type=dtype)
    normalizer = key.sum(axis=1, dtype=dtype)
    total = (query.astype(dtype) * normalizer[:, None, :, None]).sum(axis=-1)
    query, values = _multiplied(query, values)
    return _normalise(jnp.einsum("btkgf,bkfh->btkgh", query, values, preferred_element_type=dtype), total)


def _multiplied(query: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and a state's float32 values in one dtype: the queries', but float16 cannot hold sums over all keys."""
    dtype = values.dtype if query.dtype == jnp.float16 else query.dtype
    return query.astype(dtype), values.astype(dtype)


def _normalise(out: jax.Array, total: jax.Array) -> jax.Array:
    """out / total, and 0 where the sum of the similarities is not greater than 0."""
    some = total > _TINY
    # Scaled first: the derivative of 1 / total holds a square, which would overflow.
    scale = jax.lax.stop_gradient(jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0))
    return out * scale[..., None] / jnp.where(some, total * scale, 1.0)[..., None]


def _flip(chunks: _Chunks) -> _Chunks:
    """The tokens in reverse order."""
    return jax.tree.map(lambda x: jnp.flip(x, axis=(1, 2)), chunks)


def _flip_before(before: _Before) -> _Before:
    state = jax.tree.map(lambda x: jnp.flip(x, axis=1), before.state)
    return _Before(state, None if before.seen is None else jnp.flip(before.seen, axis=(1, 2)))
