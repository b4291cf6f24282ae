"""Paged attention in XLA: a loop copies a block of keys of every sequence from its pages, and attends to it.

The softmax is summed over blocks (Rabe and Staats 2021, arXiv:2112.05682): the cost depends on the tokens in the
pages and not on the width of the page table.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.low_bits.encoded import Stored, decode, map_stored
from pallas_kernels.paged_attention.request import PagedAttentionRequest

_BLOCK = 64
"""Keys of a block."""
_LEAST = float(jnp.finfo(jnp.float32).min)


def unsupported_reason(request: PagedAttentionRequest) -> str | None:
    """Return None, as this backend computes every call of paged attention."""
    del request
    return None


def attend(request: PagedAttentionRequest) -> jax.Array:
    """Compute paged attention in XLA: [B, T, N, V] in the dtype of the queries."""
    q = request.q
    lengths = request.lengths
    batch, length, heads, width = q.shape
    pages = max(1, min(_BLOCK // request.page_size, request.page_table.shape[1]))
    block = pages * request.page_size
    table = jnp.pad(request.page_table, ((0, 0), (0, -request.page_table.shape[1] % pages)))
    grouped = q.reshape(batch, length, request.key_heads, -1, width)
    positions = lengths[:, None] - length + jnp.arange(length, dtype=jnp.int32)

    def add_block(
        number: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, values = carry
        part = jax.lax.dynamic_slice_in_dim(table, number * pages, pages, axis=1)
        k = _rows(request.k_pages, part, q.dtype)
        shared = request.value_width is not None
        v = k[..., : request.value_width] if shared else _rows(request.v_pages, part, q.dtype)
        scores = _scores(request, grouped, k, positions, number * block)
        higher = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(highest - higher)
        update = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return higher, total * shrink + weights.sum(-1), values * shrink[..., None] + update

    shape = (batch, request.key_heads, heads // request.key_heads, length)
    # A query that sees no key of a block counts them with weight 1, until the first key that it sees shrinks that to 0.
    carry = jnp.full(shape, _LEAST), jnp.zeros(shape), jnp.zeros((*shape, request.value_width or width))
    if request.sinks is not None:  # A score that every query sees, whose value is 0.
        sinks = request.sinks.astype(jnp.float32).reshape(shape[1:3])[None, :, :, None]
        carry = jnp.broadcast_to(sinks, shape), jnp.ones(shape), carry[2]
    first = _first_block(request, block)
    end = -(-lengths.max() // block)
    _, total, values = jax.lax.fori_loop(first, end, add_block, carry)
    out = values / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(*q.shape[:3], -1).astype(q.dtype)


def _rows(stored: Stored, table: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the keys or values of each sequence, read from its pages `table` [B, pages], decoded: [B, keys, K, H]."""
    return decode(map_stored(lambda x: x[table].reshape(len(table), -1, *x.shape[2:]), stored), dtype)


def _scores(
    request: PagedAttentionRequest, q: jax.Array, k: jax.Array, positions: jax.Array, start: jax.Array
) -> jax.Array:
    """Return masked scores of q [B, T, K, G, H] and keys from position `start` on: float32 [B, K, G, T, keys]."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * request.scale
    if request.soft_cap:
        scores = jnp.tanh(scores / request.soft_cap) * request.soft_cap
    keys = start + jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = keys <= positions[:, :, None]
    if request.window is not None:
        visible &= keys > positions[:, :, None] - request.window
    return jnp.where(visible[:, None, None], scores, _LEAST)


def _first_block(request: PagedAttentionRequest, block: int) -> jax.Array:
    """Return the index of the first block of keys that any query sees; 0 if there is no sliding window."""
    if request.window is None:
        return jnp.zeros((), jnp.int32)
    first = jnp.maximum(request.lengths - request.q.shape[1] + 1 - request.window, 0)
    return jnp.min(jnp.where(request.lengths > 0, first, jnp.iinfo(jnp.int32).max)) // block
