"""Attention in chunks of keys with the online softmax, in plain XLA: any device, memory linear in the length.

The tiles that the mask leaves are listed while tracing, and one scan visits them; tiles that the mask leaves whole are
visited by a separate scan that computes no mask. With segments, tiles without a common document are skipped at run
time. The backward recomputes the scores tile by tile from q, k, v, out and the log-sum-exp. (FlashAttention's
algorithm, Dao et al., arXiv:2205.14135 and arXiv:2307.08691.)
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention import scores as pieces
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import AttentionRequest, Gradients, Options, Segments
from pallas_kernels.attention.scores import SoftmaxState
from pallas_kernels.attention.visible_tiles import Blocks, possible_tiles, visible_block_pairs, visible_tiles

_LARGEST_BLOCK = 1024
_SMALLEST_BLOCK = 128
_TILE_BYTES = 2**28
# Number of scores whose computation takes as long as the overhead of one loop step, fitted to the rows of
# benchmarks/results/attention.jsonl for this backend on an H200.
_STEP_ELEMENTS = 2**22


State = TypeVar("State")
Visit = Callable[[State, jax.Array, bool], State]
"""Return the state after a tile, given as (block numbers [2], True if the mask cuts it)."""
Weigh = Callable[[jax.Array, bool], tuple[jax.Array, jax.Array]]
"""Return the softmax weights of a tile, given as in `Visit`, and the gradients of its products q.k.

Both are [B, K, G, rows, keys].
"""


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return None, as this backend computes every attention call."""
    del request
    return None


def attend(request: AttentionRequest) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention tile by tile in XLA: return out [B, T, N, H] and the log-sum-exp [B, N, T]."""
    tiling = _tiling(request)
    padded = _padded((request.q, request.k, request.v), request.segments, tiling)
    out, lse = _differentiable(request.options, tiling, *padded)
    return pieces.with_sinks(out[:, : tiling.length], lse[..., : tiling.length], request.sinks)


def gradients(
    request: AttentionRequest, d_out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Gradients:
    """Compute dQ, dK and dV of attention to a part of the keys, given row statistics (lse, delta) over all keys."""
    arrays = request.q, request.k, request.v
    return gradients_by_tiles(request.options, _tiling(request), arrays, request.segments, (d_out, lse, delta))


def gradients_by_tiles(
    options: Options,
    tiling: Blocks,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    segments: Segments | None,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    weigh: Weigh | None = None,
) -> Gradients:
    """Compute dQ, dK and dV in one pass over the visible tiles, in each of which XLA multiplies large matrices.

    Args:
        options: mask, scale and soft cap.
        tiling: lengths and block sizes.
        arrays: q [B, T, N, H], k and v [B, S, K, H].
        segments: segment ids, or None.
        rows: d_out [B, T, N, H], and the log-sum-exp and delta [B, N, T], which may be those of more keys than these.
        weigh: computes a tile's softmax weights and score gradients, if not XLA.
    """
    d_out, lse, delta = rows
    missing = -tiling.length % tiling.query_block
    lse, delta = (jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for x in (lse, delta))
    rows = _pad(d_out, tiling.query_block), lse, delta
    backward = _Backward.create(options, tiling, *_padded(arrays, segments, tiling), rows)
    d_q, d_k, d_v = backward.gradients(weigh)
    return d_q[:, : tiling.length], d_k[:, : tiling.key_length], d_v[:, : tiling.key_length]


def _padded(
    arrays: tuple[jax.Array, jax.Array, jax.Array], segments: Segments | None, tiling: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array, Segments | None]:
    """Return q, k, v and segment ids of an attention call, padded to whole blocks."""
    q, k, v = arrays
    q = _pad(q, tiling.query_block)
    k = _pad(k, tiling.key_block)
    v = _pad(v, tiling.key_block)
    if segments is not None:
        segments = Segments(*(_pad(ids, block, "edge") for ids, block in zip(segments, tiling[2:], strict=True)))
    return q, k, v, segments


def _tiling(request: AttentionRequest) -> Blocks:
    rows = request.q.shape[0] * request.q.shape[2]
    return choose_blocks(
        request.options.mask, request.query_length, request.key_length, rows, request.segments is not None
    )


def choose_blocks(mask: Mask, length: int, key_length: int, rows: int, segmented: bool, multiple: int = 1) -> Blocks:
    """Choose the block sizes with the least work, of those whose float32 scores stay within `_TILE_BYTES`.

    Args:
        mask: mask of the attention.
        length: T.
        key_length: S.
        rows: number of heads of all sequences, B * N.
        segmented: True if there are segments.
        multiple: the block sizes are multiples of this number, which divides `_SMALLEST_BLOCK`.
    """
    sizes = [_LARGEST_BLOCK]
    while sizes[-1] > _SMALLEST_BLOCK:
        sizes.append(sizes[-1] // 2)
    fitting = [size for size in sizes if 4 * rows * size * size <= _TILE_BYTES] or sizes[-1:]
    longest = -(-length // multiple) * multiple
    longest_key = -(-key_length // multiple) * multiple

    def cost(blocks: Blocks) -> int:
        tiles = possible_tiles(mask, blocks, segmented).sum()
        return int(tiles) * (rows * blocks.query_block * blocks.key_block + _STEP_ELEMENTS)

    return min((Blocks(length, key_length, min(size, longest), min(size, longest_key)) for size in fitting), key=cost)


def _pad(x: jax.Array, block: int, mode: str = "constant") -> jax.Array:
    missing = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode=mode) if missing else x


def _attend(
    options: Options, tiling: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    dtype = pieces.accumulator_dtype(q.dtype)
    grouped = pieces.group_heads(q, k.shape[2])
    rows = (q.shape[0], *grouped.shape[2:4], q.shape[1])
    start = SoftmaxState(jnp.zeros(grouped.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype))

    labels = _label(options.mask, segments)

    def visit(state: SoftmaxState, pair: jax.Array, masked: bool) -> SoftmaxState:
        tile = _Tile(options, tiling, pair, masked)
        row = SoftmaxState(tile.rows(state.out, 1), tile.rows(state.maximum, -1), tile.rows(state.total, -1))
        row = pieces.absorb(row, tile.scores(grouped, k, labels), tile.keys(v, 1))
        return SoftmaxState(
            tile.update_rows(state.out, row.out, 1),
            tile.update_rows(state.maximum, row.maximum, 3),
            tile.update_rows(state.total, row.total, 3),
        )

    out, lse = pieces.finish(_visit_tiles(options, tiling, segments, visit, start))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _forward_rule(
    options: Options, tiling: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple:
    out, lse = name_outputs(*_attend(options, tiling, q, k, v, segments))
    return (out, lse), (q, k, v, segments, out, lse)


def _backward_rule(options: Options, tiling: Blocks, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, out, lse = residuals
    d_out, d_lse = cotangents
    if not pieces.needs_delta_correction(q.dtype):
        rows = d_out, lse, pieces.row_delta(out, d_out, d_lse)
        return *_Backward.create(options, tiling, q, k, v, segments, rows).gradients(), None
    rows = d_out, lse, pieces.row_delta(out, d_out, jnp.zeros_like(d_lse))
    return *_Backward.create(options, tiling, q, k, v, segments, rows).corrected(d_lse).gradients(), None


class _Backward(NamedTuple):
    """Inputs of the attention backward: q and d_out with grouped heads, and statistics [B, K, G, T] of each row."""

    options: Options
    tiling: Blocks
    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: Segments | None
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array
    # Only with a corrected delta: the amount subtracted from the weights' gradients, and the sums of the weights.
    shift: jax.Array | None = None
    total: jax.Array | None = None

    @classmethod
    def create(
        cls,
        options: Options,
        tiling: Blocks,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments | None,
        row_statistics: tuple,
    ) -> "_Backward":
        d_out, lse, delta = row_statistics
        grouped = pieces.group_heads(q, k.shape[2])
        d_grouped = pieces.group_heads(d_out, k.shape[2])
        rows = (q.shape[0], *grouped.shape[2:4], q.shape[1])
        lse = pieces.finite_or_zero(lse).reshape(rows)
        delta = delta.reshape(rows)
        return cls(options, tiling, grouped, k, v, segments, d_grouped, lse, delta)

    def corrected(self, d_lse: jax.Array) -> "_Backward":
        """Return the backward's inputs with a more exact delta (row sums of dO * O), from one more pass over all tiles.

        `self.delta` must not contain d_lse yet; the result does.
        """
        shifted = self._replace(shift=self.delta)

        def visit(sums: tuple, pair: jax.Array, masked: bool) -> tuple:
            tile = _Tile(self.options, self.tiling, pair, masked)
            weights, d_weights, _ = shifted.softmax_weights(tile)
            parts = weights.sum(axis=-1), (weights * d_weights).sum(axis=-1)
            return tuple(tile.update_rows(x, tile.rows(x, -1) + part, 3) for x, part in zip(sums, parts, strict=True))

        start = jnp.zeros_like(self.lse), jnp.zeros_like(self.lse)
        total, products = _visit_tiles(self.options, self.tiling, self.segments, visit, start)
        total = pieces.one_if_zero(total)
        return shifted._replace(total=total, delta=products / total - d_lse.reshape(self.lse.shape))

    def softmax_weights(self, tile: "_Tile") -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a tile's softmax weights, their gradient (minus `self.shift`, if set), and its scores.

        All are [B, K, G, rows, keys].
        """
        scores = tile.scores(self.q, self.k, _label(self.options.mask, self.segments))
        weights = jnp.exp(scores - tile.rows(self.lse, -1)[..., None])
        rows = tile.rows(self.d_out, 1)
        keys = tile.keys(self.v, 1)
        d_weights = jnp.einsum("btkgh,bskh->bkgts", rows, keys, preferred_element_type=scores.dtype)
        if self.shift is not None:
            d_weights -= tile.rows(self.shift, -1)[..., None]
        if self.total is not None:
            weights = weights / tile.rows(self.total, -1)[..., None]
        return weights, d_weights, scores

    def weigh(self, pair: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array]:
        """Return a tile's softmax weights and the gradients of its products q.k, both [B, K, G, rows, keys]."""
        tile = _Tile(self.options, self.tiling, pair, masked)
        weights, d_weights, scores = self.softmax_weights(tile)
        return weights, pieces.score_gradient(weights, d_weights, tile.rows(self.delta, -1), scores, self.options)

    def gradients(self, weigh: Weigh | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute dQ, dK and dV in one pass over all visible tiles, with `weigh` in place of the method if given."""
        weigh = weigh or self.weigh

        def visit(gradients: tuple, pair: jax.Array, masked: bool) -> tuple:
            d_q, d_k, d_v = gradients
            tile = _Tile(self.options, self.tiling, pair, masked)
            weights, gradient = weigh(pair, masked)
            of_q = pieces.weighted_sum_of_values(gradient, tile.keys(self.k, 1))
            of_k = pieces.sum_over_queries(gradient, tile.rows(self.q, 1))
            of_v = pieces.sum_over_queries(weights, tile.rows(self.d_out, 1))
            return (
                tile.update_rows(d_q, tile.rows(d_q, 1) + of_q, 1),
                tile.update_keys(d_k, tile.keys(d_k, 1) + of_k, 1),
                tile.update_keys(d_v, tile.keys(d_v, 1) + of_v, 1),
            )

        start = tuple(jnp.zeros(x.shape, self.lse.dtype) for x in (self.q, self.k, self.v))
        d_q, d_k, d_v = _visit_tiles(self.options, self.tiling, self.segments, visit, start)
        batch, length, *heads, head_dim = self.q.shape
        d_q = d_q.reshape(batch, length, heads[0] * heads[1], head_dim)
        return d_q.astype(self.q.dtype), d_k.astype(self.k.dtype), d_v.astype(self.v.dtype)


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0, 1))
_differentiable.defvjp(_forward_rule, _backward_rule)


class _SegmentLabels(NamedTuple):
    """Segment ids of queries and keys, and which tokens are global tokens of their document."""

    ids: Segments
    is_global: tuple[jax.Array, jax.Array] | None


def _label(mask: Mask, segments: Segments | None) -> _SegmentLabels | None:
    return None if segments is None else _SegmentLabels(segments, segments.global_tokens(mask))


class _Tile(NamedTuple):
    """A tile of the score matrix: a query block and a key block, given by traced block numbers."""

    options: Options
    tiling: Blocks
    pair: jax.Array
    masked: bool

    def rows(self, x: jax.Array, dim: int) -> jax.Array:
        size = self.tiling.query_block
        return jax.lax.dynamic_slice_in_dim(x, self.pair[0] * size, size, dim)

    def keys(self, x: jax.Array, dim: int) -> jax.Array:
        size = self.tiling.key_block
        return jax.lax.dynamic_slice_in_dim(x, self.pair[1] * size, size, dim)

    def update_rows(self, x: jax.Array, update: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, update, self.pair[0] * self.tiling.query_block, dim)

    def update_keys(self, x: jax.Array, update: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, update, self.pair[1] * self.tiling.key_block, dim)

    def scores(self, grouped: jax.Array, k: jax.Array, labels: _SegmentLabels | None) -> jax.Array:
        """Return the tile's attention scores [B, K, G, query block, key block], -inf for hidden keys."""
        scores = pieces.raw_scores(self.rows(grouped, 1), self.keys(k, 1), self.options)
        if not self.masked:
            return scores
        tiling = self.tiling
        queries = jnp.arange(tiling.query_block) + self.pair[0] * tiling.query_block
        keys = jnp.arange(tiling.key_block) + self.pair[1] * tiling.key_block
        is_global = None
        if labels is not None and labels.is_global is not None:
            is_global = self.rows(labels.is_global[0], 1), self.keys(labels.is_global[1], 1)
        visible = jnp.broadcast_to(keys[None, :] < tiling.key_length, (queries.size, keys.size))
        unmasked = self.options.mask.visible(queries + tiling.key_length - tiling.length, keys, is_global)
        if unmasked is not None:
            visible = visible & unmasked
        if labels is not None:
            query_ids = self.rows(labels.ids.query, 1)
            key_ids = self.keys(labels.ids.key, 1)
            visible = visible & (query_ids[:, :, None] == key_ids[:, None, :])
        visible = visible[:, None, None] if visible.ndim == 3 else visible
        return jnp.where(visible, scores, -jnp.inf)


def _visit_tiles(
    options: Options,
    tiling: Blocks,
    segments: Segments | None,
    visit: Visit[State],
    state: State,
) -> State:
    """Loop over the tiles that have visible keys with state = visit(state, pair, masked); return the last state."""
    if segments is not None:
        return _visit_active_tiles(options.mask, tiling, segments, visit, state)
    for pairs, masked in zip(visible_block_pairs(options.mask, *tiling), (False, True), strict=True):
        if len(pairs):
            state, _ = jax.lax.scan(
                lambda state, pair, masked=masked: (visit(state, pair, masked), None),
                state,
                jnp.asarray(pairs),
            )
    return state


def _visit_active_tiles(mask: Mask, tiling: Blocks, segments: Segments, visit: Visit[State], state: State) -> State:
    """Loop over the tiles visible in at least one sequence, a set known only at run time, as in `_visit_tiles`."""
    pairs = jnp.asarray(np.argwhere(possible_tiles(mask, tiling, True)), jnp.int32)
    active = visible_tiles(mask, tiling, segments)[0].any(axis=0)[pairs[:, 0], pairs[:, 1]]
    pairs = pairs[jnp.argsort(~active, stable=True)]
    return jax.lax.fori_loop(0, active.sum(), lambda i, state: visit(state, pairs[i], True), state)
