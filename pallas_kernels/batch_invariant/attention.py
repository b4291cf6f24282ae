"""Batch-invariant softmax attention to pages of keys: the same blocks of keys for each query, in one order.

A whole sequence is one page. Dims: R sequences, T new tokens, N query heads, K key heads, H head dim.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.api import flash_attention
from pallas_kernels.batch_invariant.mode import with_gradient_of
from pallas_kernels.batch_invariant.rows import sum_row
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.low_bits.encoded import Stored
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.request import PagedAttentionRequest, make_request

TILE = triton.Tile(64, warps=4, stages=3, ranges=1, rows=64, least_rows=64)
"""Sizes of a program, for any number of new tokens."""
_CPU_QUERIES = 8
_CPU_KEYS = 16
"""Queries of a tile, and keys of a block, of the loop on other devices."""


def attend_whole(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Return the causal attention of whole sequences, with the gradient of `flash_attention`.

    Args:
        q, k, v: queries, keys and values.
        scale, soft_cap, window: as there.
        implementation: backend of the gradient.
    """
    rows, length = q.shape[:2]

    def paged(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        table = jnp.arange(rows, dtype=jnp.int32)[:, None]
        lengths = jnp.full(rows, length, jnp.int32)
        return attend_pages(q, k, v, table, lengths, scale=scale, soft_cap=soft_cap, window=window)

    def usual(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(
            q, k, v, causal=True, window=window, scale=scale, soft_cap=soft_cap, implementation=implementation
        )  # type: ignore[return-value]

    return with_gradient_of(usual, paged)(q, k, v)


def attend_pages(
    q: Float[Array, "R T N H"],
    k_pages: Float[Array, "P page K H"],
    v_pages: Float[Array, "P page K H"],
    page_table: Int[Array, "R pages"],
    lengths: Int[Array, " R"],
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Float[Array, "R T N H"]:
    """Return the attention of each sequence's last T tokens, see `pallas_kernels.paged_attention`."""
    request = make_request(q, k_pages, v_pages, page_table, lengths, scale=scale, soft_cap=soft_cap, window=window)
    return select("batch_invariant_attention", _BACKENDS, None, request).call(request)


def kernel_problem(head_dim: int, dtype: DTypeLike) -> str | None:
    """Return why the kernel for GPUs cannot compute attention, so that a slow loop would; None: it can, or on a CPU.

    Args:
        head_dim: channels of a head.
        dtype: of queries, keys and values.
    """
    x = jnp.zeros((1, 1, 1, head_dim), dtype)
    table = jnp.zeros((1, 1), jnp.int32)
    request = make_request(x, x, x, table, table[0] + 1, scale=None, soft_cap=None, window=None)
    return None if request.target.platform == "cpu" else _unsupported_by_triton(request)


def _by_triton(request: PagedAttentionRequest) -> jax.Array:
    return triton.attend(request, TILE)


def _unsupported_by_triton(request: PagedAttentionRequest) -> str | None:
    return triton.unsupported_tile(request)


def _by_loop(request: PagedAttentionRequest) -> jax.Array:
    """Compute tile after tile of queries, a key head at a time, each in a loop over blocks of keys."""
    q = request.q
    sequences, new, num_heads, width = q.shape
    heads = request.key_heads
    group = num_heads // heads
    tiles = -(-new // _CPU_QUERIES)
    rows = jnp.pad(q, ((0, 0), (0, tiles * _CPU_QUERIES - new), (0, 0), (0, 0)))
    rows = rows.reshape(sequences, tiles, _CPU_QUERIES, heads, group, width)
    rows = jnp.moveaxis(rows, 3, 2).reshape(-1, _CPU_QUERIES * group, width)
    numbers = jnp.arange(sequences * tiles * heads)
    found = jax.lax.map(lambda x: _attend_tile(request, *x), (rows, *_places(numbers, tiles, heads)))
    found = found.reshape(sequences, tiles, heads, _CPU_QUERIES, group, width)
    return jnp.moveaxis(found, 2, 3).reshape(sequences, -1, num_heads, width)[:, :new]


def _places(numbers: jax.Array, tiles: int, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sequence, the number of the tile in it, and the head of each tile."""
    return numbers // (tiles * heads), numbers // heads % tiles, numbers % heads


def _attend_tile(
    request: PagedAttentionRequest, rows: jax.Array, sequence: jax.Array, tile: jax.Array, head: jax.Array
) -> jax.Array:
    """Return the attention of a tile of queries of one key head, [rows, H]."""
    new = request.q.shape[1]
    group = request.q.shape[2] // request.key_heads
    table = request.page_table[sequence]
    length = request.lengths[sequence]
    position = length - new + tile * _CPU_QUERIES + jnp.arange(rows.shape[0]) // group
    size = request.page_size
    wide = rows.astype(jnp.float32)

    def take(pages: Stored, keys: jax.Array) -> jax.Array:
        page = table[jnp.minimum(keys // size, table.shape[0] - 1)]
        return cast(jax.Array, pages)[page, keys % size, head].astype(jnp.float32)

    def add_block(block: jax.Array, carry: tuple) -> tuple:
        highest, total, values = carry
        keys = block * _CPU_KEYS + jnp.arange(_CPU_KEYS)
        inside = (keys < length)[:, None]
        key, value = (jnp.where(inside, take(x, keys), 0) for x in (request.k_pages, request.v_pages))
        left, key, value = jax.lax.optimization_barrier((wide, key, value))
        scores = jax.lax.optimization_barrier(left @ key.T) * request.scale
        if request.soft_cap is not None:
            scores = request.soft_cap * jnp.tanh(scores / request.soft_cap)
        seen = (keys[None] <= position[:, None]) & (keys < length)[None]
        if request.window is not None:
            seen &= keys[None] > position[:, None] - request.window
        scores = jnp.where(seen, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(1))
        pivot = jnp.where(new_highest == -jnp.inf, 0.0, new_highest)
        weights = jnp.exp(scores - pivot[:, None])
        shrink = jnp.exp(highest - pivot)
        total = jax.lax.optimization_barrier(total * shrink) + sum_row(weights)[:, 0]
        rounded = weights.astype(request.q.dtype).astype(jnp.float32)
        rounded, value = jax.lax.optimization_barrier((rounded, value))
        product = jax.lax.optimization_barrier((values * shrink[:, None], rounded @ value))
        return new_highest, total, product[0] + product[1]

    count = rows.shape[0]
    empty = jnp.full(count, -jnp.inf), jnp.zeros(count), jnp.zeros((count, rows.shape[1]))
    _, total, values = jax.lax.fori_loop(0, -(-length // _CPU_KEYS), add_block, empty)
    return (values / jnp.where(total == 0, 1.0, total)[:, None]).astype(rows.dtype)


_BACKENDS = (
    Backend("triton", "reads pages where they are", _unsupported_by_triton, _by_triton, opaque=True),
    Backend("xla", "a loop over tiles of queries, on every device", lambda _: None, _by_loop),
)
