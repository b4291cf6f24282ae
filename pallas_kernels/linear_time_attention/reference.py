"""Linear attention by definition, for tests of every backend: each pair of query and key is computed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.linear_time_attention.request import LinearAttentionRequest
from pallas_kernels.linear_time_attention.state import EMPTY, LinearState


def attend(request: LinearAttentionRequest) -> tuple[Float[Array, "B T N H"], LinearState | None]:
    """Return linear attention [B, T, N, H] by its definition, and if causal the recurrent state after the last token.

    The whole [B, N, T, S] matrix of similarities is materialised in float32 (float64 for float64 inputs) and
    differentiated by jax. A query whose similarities sum to 0 has the output 0.
    """
    dtype = jnp.promote_types(request.q.dtype, jnp.float32)
    query = request.feature_map.query(request.q).values
    features = request.feature_map.key(request.k)
    key = features.values.astype(dtype)
    v = request.v.astype(dtype)
    weight = jnp.zeros(key.shape[:3], dtype) if features.log_weight is None else features.log_weight
    if request.hidden is not None:
        key = jnp.where(request.hidden[..., None, None], 0, key)
        weight = jnp.where(request.hidden[..., None], EMPTY, weight)
    group = query.shape[2] // key.shape[2]
    similarity = jnp.einsum("btnf,bsnf->bnts", query.astype(dtype), jnp.repeat(key, group, axis=2), precision="highest")
    visible = _visible(request)
    weights = jnp.where(visible, jnp.repeat(jnp.moveaxis(weight, 1, 2), group, axis=1)[:, :, None], EMPTY)
    largest = weights.max(axis=-1, keepdims=True)
    state = request.state
    if state is not None:
        largest = jnp.maximum(largest, jnp.repeat(state.log_scale, group, axis=1)[..., None, None])
    similarity = jnp.where(visible, similarity * jnp.exp(weights - largest), 0)
    out = jnp.einsum("bnts,bsnh->btnh", similarity, jnp.repeat(v, group, axis=2), precision="highest")
    total = jnp.moveaxis(similarity.sum(axis=-1), 1, 2)
    if state is not None:
        seen = jnp.exp(jnp.repeat(state.log_scale, group, axis=1)[..., None] - largest[..., 0])
        if request.documents is not None:
            seen = jnp.where(request.documents[:, None] == request.documents[:, None, :1], seen, 0)
        wide = jnp.moveaxis(seen, 1, 2)[..., None] * query.astype(dtype)
        values, normalizer = (jnp.repeat(x, group, axis=1) for x in state[:2])
        out = out + jnp.einsum("btnf,bnfh->btnh", wide, values, precision="highest")
        total = total + jnp.einsum("btnf,bnf->btn", wide, normalizer, precision="highest")
    out = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)[..., None] * out
    return out.astype(request.q.dtype), _last_state(request, key, weight, v) if request.causal else None


def _visible(request: LinearAttentionRequest) -> Bool[Array, "_ 1 T S"]:
    """Return which keys each query sees under the mask and documents, boolean [B or 1, 1, T, S]."""
    visible = jnp.ones((1, 1, request.q.shape[1], request.k.shape[1]), bool)
    if request.causal:
        visible = jnp.tril(visible)
    if request.documents is not None:
        visible = visible & (request.documents[:, None, :, None] == request.documents[:, None, None, :])
    return visible


def _last_state(request: LinearAttentionRequest, key: jax.Array, weight: jax.Array, v: jax.Array) -> LinearState:
    """Return the recurrent state after the last token: sums over the keys of that token's document."""
    start = request.state
    if request.documents is not None:
        last = request.documents[:, -1:]
        weight = jnp.where((request.documents == last)[..., None], weight, EMPTY)
        key = jnp.where((request.documents == last)[..., None, None], key, 0)
        if start is not None:
            continues = (last == request.documents[:, :1])[..., 0]
            start = jax.tree.map(lambda x: jnp.where(continues.reshape(-1, *[1] * (x.ndim - 1)), x, 0), start)
    log_scale = weight.max(axis=1)
    if start is not None:
        log_scale = jnp.maximum(log_scale, start.log_scale)
    key = key * jnp.exp(weight - log_scale[:, None])[..., None]
    state = LinearState(
        jnp.einsum("bskf,bskh->bkfh", key, v, precision="highest"), key.sum(axis=1), jax.lax.stop_gradient(log_scale)
    )
    if start is None:
        return state
    scale = jnp.exp(start.log_scale - log_scale)
    return LinearState(
        state.values + start.values * scale[..., None, None],
        state.normalizer + start.normalizer * scale[..., None],
        state.log_scale,
    )
