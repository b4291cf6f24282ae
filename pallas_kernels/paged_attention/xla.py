"""Paged attention by XLA: copies the pages of every sequence into one array, and attends to all of it."""

import jax
import jax.numpy as jnp

from pallas_kernels.low_bits.encoded import Stored, decode, map_stored
from pallas_kernels.paged_attention.request import PagedAttentionRequest


def unsupported_reason(request: PagedAttentionRequest) -> str | None:
    """Return None: XLA computes every request."""
    del request
    return None


def attend(request: PagedAttentionRequest) -> jax.Array:
    """Return the attention [B, T, N, H] in the dtype of the queries."""
    q, table, lengths = request.q, request.page_table, request.lengths
    batch, length, _, width = q.shape

    def rows(pages: Stored) -> jax.Array:
        return decode(map_stored(lambda x: x[table].reshape(batch, -1, *x.shape[2:]), pages), q.dtype)

    k, v = rows(request.k_pages), rows(request.v_pages)
    positions = lengths[:, None] - length + jnp.arange(length, dtype=jnp.int32)
    keys = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = keys <= positions[:, :, None]
    if request.window is not None:
        visible &= keys > positions[:, :, None] - request.window
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * request.scale
    if request.soft_cap:
        scores = jnp.tanh(scores / request.soft_cap) * request.soft_cap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
