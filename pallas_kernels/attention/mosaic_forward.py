"""The forward of attention for Hopper: wgmma, TMA, a loading warpgroup and two computing ones that take turns.

Each program owns one block of queries of one head. One warpgroup streams the visible key and value blocks into a
ring of shared memory buffers; each of the others keeps 64 queries' running maximum, sum and output in registers.
While one of them is in its softmax the other has the tensor cores (the ping-pong schedule of FlashAttention-3,
Shah et al., arXiv:2407.08608).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import mosaic_pieces as pieces
from pallas_kernels.attention.mosaic_pieces import ROWS, Config
from pallas_kernels.attention.request import Segments
from pallas_kernels.mosaic_api import pl, plgpu


class _Buffers(NamedTuple):
    """Shared memory and its barriers; one row of the leading dimension per warpgroup or per stage."""

    q: Any
    lse: Any
    k: Any
    v: Any
    query_ids: Any
    key_ids: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    turn: Any


def forward(
    config: Config, q: jax.Array, k: jax.Array, v: jax.Array, ranges: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T] (natural logarithm, -inf for rows without a visible key).

    Args:
        q: [B, T, N, H] with T a multiple of the query block.
        k, v: [B, S, K, H] with S a multiple of the key block.
        ranges: int32 [B or 1, T / query block, 4] of `tiles.key_ranges`.
        segments: int32 [B, T] and [B, S], or None.
    """
    batch, length, num_heads, _ = q.shape
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32),
    )
    inputs = (q, k, v, ranges) if segments is None else (q, k, v, ranges, *segments)
    kernel = config.kernel(
        functools.partial(_body, config, segments is not None),
        out_type=out_type,
        grid=(num_heads, length // config.query_block, batch),
        grid_names=("head", "query_block", "batch"),
        scratch_types=_scratch(config, q, segments is not None),
    )
    return kernel(*inputs)


def _scratch(config: Config, q: jax.Array, has_segments: bool) -> _Buffers:
    head_dim, groups, stages = q.shape[-1], config.warpgroups, config.stages
    arrivals = 2 if has_segments else 1
    return _Buffers(
        q=pieces.tiled_smem(config, (groups, ROWS, head_dim), q.dtype),
        lse=plgpu.SMEM((groups, ROWS), jnp.float32),
        k=pieces.tiled_smem(config, (stages, config.key_block, head_dim), q.dtype),
        v=pieces.tiled_smem(config, (stages, config.key_block, head_dim), q.dtype),
        query_ids=plgpu.SMEM((groups, ROWS), jnp.int32) if has_segments else None,
        key_ids=plgpu.SMEM((stages, config.key_block), jnp.int32) if has_segments else None,
        q_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=groups),
        k_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=groups),
    )


def _body(config: Config, has_segments: bool, *refs: Any) -> None:
    inputs, (out, lse, *scratch) = refs[: 6 if has_segments else 4], refs[6 if has_segments else 4 :]
    buffers = _Buffers(*scratch)
    warpgroup = lax.axis_index("warpgroup")
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    # The last blocks of queries have the most causal work: they start first.
    block = inputs[0].shape[1] // config.query_block - 1 - lax.axis_index("query_block")
    row = batch if inputs[3].shape[0] > 1 else 0
    limits = [inputs[3][row, block, index] for index in range(4)]

    @pl.when(warpgroup < config.warpgroups)
    def _():
        config.share_registers(computing=True)
        _compute(config, inputs, (out, lse), buffers, (batch, head, block), limits)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        config.share_registers(computing=False)
        group = inputs[0].shape[2] // inputs[1].shape[2]
        _load(config, inputs, buffers, batch, lax.div(head, group), limits)


def _load(config: Config, inputs: Any, buffers: _Buffers, batch: Any, kv_head: Any, limits: list) -> None:
    """Streams the key and value blocks through the ring of buffers."""
    first, _, _, end = limits

    def step(tile: jax.Array, _: None) -> None:
        count = tile - first
        slot = lax.rem(count, config.stages)
        keys = pl.ds(tile * config.key_block, config.key_block)

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.k_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs[1].at[batch, keys, kv_head], buffers.k.at[slot], buffers.k_full.at[slot])
        if buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(inputs[5].at[batch, keys], buffers.key_ids.at[slot], buffers.k_full.at[slot])

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.v_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs[2].at[batch, keys, kv_head], buffers.v.at[slot], buffers.v_full.at[slot])

    lax.fori_loop(first, end, step, None)
    pieces.drain(config, end - first, (buffers.k_empty, buffers.v_empty))


def _compute(config: Config, inputs: Any, outputs: Any, buffers: _Buffers, place: tuple, limits: list) -> None:
    """One warpgroup's 64 queries against all blocks of keys in the limits."""
    batch, head, block = place
    warpgroup = lax.axis_index("warpgroup")
    first_query = block * config.query_block + warpgroup * ROWS
    rows = pl.ds(first_query, ROWS)
    q = buffers.q.at[warpgroup]
    plgpu.copy_gmem_to_smem(inputs[0].at[batch, rows, head], q, buffers.q_full.at[warpgroup])
    query_ids = None
    if buffers.query_ids is not None:
        ids = buffers.query_ids.at[warpgroup]
        plgpu.copy_gmem_to_smem(inputs[4].at[batch, rows], ids, buffers.q_full.at[warpgroup])
    plgpu.barrier_wait(buffers.q_full.at[warpgroup])
    if buffers.query_ids is not None:
        query_ids = plgpu.load(buffers.query_ids.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))

    first, first_whole, end_whole, end = limits
    pl.when(warpgroup == 1)(lambda: _take_turns(buffers))
    state = (
        pieces.zeros(ROWS, q.shape[-1]),
        pieces.row_values(pieces.fill(config) * config.factor, ROWS),
        pieces.row_values(0.0, ROWS),
    )

    def step(masked: bool, tile: jax.Array, state: tuple) -> tuple:
        return _attend_tile(config, buffers, state, tile, first, masked, first_query, query_ids)

    state = lax.fori_loop(first, first_whole, functools.partial(step, True), state)
    state = lax.fori_loop(first_whole, end_whole, functools.partial(step, False), state)
    state = lax.fori_loop(end_whole, end, functools.partial(step, True), state)
    pl.when(warpgroup == 0)(lambda: _take_turns(buffers))
    _store(config, outputs, buffers, (batch, rows, head), state)


def _take_turns(buffers: _Buffers) -> None:
    """Both computing warpgroups meet here; one is half a step ahead, so that they alternate."""
    plgpu.barrier_arrive(buffers.turn)
    plgpu.barrier_wait(buffers.turn)


def _attend_tile(
    config: Config,
    buffers: _Buffers,
    state: tuple,
    tile: jax.Array,
    first: jax.Array,
    masked: bool,
    first_query: jax.Array,
    query_ids: jax.Array | None,
) -> tuple:
    acc, maximum, total = state
    slot = lax.rem(tile - first, config.stages)
    q, k = buffers.q.at[lax.axis_index("warpgroup")], buffers.k.at[slot]
    plgpu.barrier_wait(buffers.k_full.at[slot])

    def products(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        _take_turns(buffers)

    scores = pieces.cap(config, pieces.multiply((ROWS, config.key_block), products))
    if masked:
        ids = None
        if query_ids is not None:
            key_ids = plgpu.load(buffers.key_ids.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
            ids = pieces.along_rows(query_ids, scores), pieces.along_columns(key_ids, scores)
        scores = pieces.mask_tile(config, scores, pieces.fill(config), first_query, tile * config.key_block, ids)
    pieces.release(config, buffers.k_empty.at[slot])

    # With a positive factor the maximum commutes with it, and weight = exp2(score * factor - maximum) is one
    # fused multiply-add and one exponential.
    factor = config.factor
    if factor <= 0:
        scores, factor = scores * factor, 1.0
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * factor - pieces.along_rows(new_maximum, scores))
    total = total * shrink + weights.sum(axis=1)
    acc = acc * pieces.along_rows(shrink, acc)
    narrow = weights.astype(q.dtype)
    acc, total, new_maximum, narrow = lax.optimization_barrier((acc, total, new_maximum, narrow))
    plgpu.barrier_arrive(buffers.turn)
    plgpu.barrier_wait(buffers.v_full.at[slot])
    plgpu.barrier_wait(buffers.turn)
    (acc,) = pieces.add_products(config, (acc,), (lambda: narrow, buffers.v.at[slot]))
    pieces.release(config, buffers.v_empty.at[slot])
    return acc, new_maximum, total


def _store(config: Config, outputs: Any, buffers: _Buffers, place: tuple, state: tuple) -> None:
    out, lse = outputs
    batch, rows, head = place
    acc, maximum, total = state
    warpgroup = lax.axis_index("warpgroup")
    empty = maximum < pieces.empty_below(config)
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    buffers.q.at[warpgroup][...] = (acc * pieces.along_rows(inverse, acc)).astype(out.dtype)
    logarithm = (maximum + jnp.log2(jnp.where(empty, 1.0, total))) * (1.0 / pieces.LOG2E)
    buffers.lse.at[warpgroup][...] = jnp.where(empty, -jnp.inf, logarithm)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.q.at[warpgroup], out.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(buffers.lse.at[warpgroup], lse.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0)
