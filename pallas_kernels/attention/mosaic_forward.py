"""The forward of attention for Hopper: wgmma, TMA, one warpgroup that loads and others that compute.

One program runs on each multiprocessor and takes blocks of queries in turn, the ones with the most keys first. Its
loading warpgroup streams the queries and the visible blocks of keys and values into rings of shared memory buffers,
well ahead of the others; each of those keeps 64 queries' running maximum, sum and output in registers. The softmax of
a tile runs beside the product of the weights and values of the tile before (FlashAttention-3, Shah et al.,
arXiv:2407.08608). A run of blocks is visited from its last to its first, so that the block that a causal mask cuts
comes before the loop.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import mosaic_pieces as pieces
from pallas_kernels.attention.mosaic_pieces import ROWS, Config, Visits
from pallas_kernels.attention.request import Segments
from pallas_kernels.mosaic_api import pl, plgpu

_TILE_BYTES = 220 * 2**10  # Of 227 KiB shared memory; the rest is for the small arrays.
_PARTS = 8  # A row's sum is kept in as many parts, two in each of its threads, and added up across them at the end.


class _Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    schedule: Any
    ids: Any


class _Buffers(NamedTuple):
    """Shared memory and its barriers; the leading dimension counts stages, of `q` also warpgroups."""

    q: Any
    lse: Any
    k: Any
    v: Any
    query_ids: Any
    key_ids: Any
    q_full: Any
    k_full: Any
    v_full: Any
    q_empty: Any
    k_empty: Any
    v_empty: Any
    turn: Any


class _Item(NamedTuple):
    """One block of queries of one head: the `number`-th of this program, which visited `before` tiles until then."""

    number: Any
    before: Any
    batch: Any
    head: Any
    block: Any
    visits: Visits


def forward(
    config: Config, q: jax.Array, k: jax.Array, v: jax.Array, schedule: tuple, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T] (natural logarithm, -inf for rows without a visible key).

    Args:
        q: [B, T, N, H] with T a multiple of the query block, or of a warpgroup's rows.
        k, v: [B, S, K, H] with S a multiple of the key block.
        schedule: that of `tiles.key_schedule`.
        segments: int32 [B, T] and [B, S], or None.
    """
    batch, length, num_heads, _ = q.shape
    items = num_heads * batch * pl.cdiv(length, config.query_block)
    kernel = config.kernel(
        "attention_forward",
        functools.partial(_body, config),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32),
        ),
        grid=(min(items, config.programs),),
        grid_names=("program",),
        scratch_types=_scratch(config, q, segments is not None),
    )
    return kernel(_Inputs(q, k, v, schedule, segments))


def _scratch(config: Config, q: jax.Array, packed: bool) -> _Buffers:
    head_dim, groups, stages = q.shape[-1], config.warpgroups, config.stages
    row_bytes = head_dim * q.dtype.itemsize
    left = _TILE_BYTES - 2 * stages * config.key_block * row_bytes
    query_stages = 2 if 2 * groups * ROWS * row_bytes <= left else 1
    arrivals = 2 if packed else 1
    return _Buffers(
        q=pieces.tiled_smem(config, (query_stages, groups, ROWS, head_dim), q.dtype),
        lse=plgpu.SMEM((query_stages, groups, ROWS), jnp.float32),
        k=pieces.tiled_smem(config, (stages, config.key_block, head_dim), q.dtype),
        v=pieces.tiled_smem(config, (stages, config.key_block, head_dim), q.dtype),
        query_ids=plgpu.SMEM((query_stages, groups, ROWS), jnp.int32) if packed else None,
        key_ids=plgpu.SMEM((stages, config.key_block), jnp.int32) if packed else None,
        q_full=plgpu.Barrier(num_arrivals=arrivals * groups, num_barriers=query_stages),
        k_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=query_stages),
        k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=groups) if config.turns else None,
    )


def _body(config: Config, inputs: _Inputs, out: Any, lse: Any, *scratch: Any) -> None:
    buffers = _Buffers(*scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < config.warpgroups)
    def _():
        config.share_registers(computing=True)
        _pass_turn(buffers, warpgroup, warpgroup == config.warpgroups - 1)
        items, _ = _for_each_item(config, inputs, functools.partial(_compute, config, inputs, (out, lse), buffers))
        _free_queries(buffers, items)
        plgpu.wait_smem_to_gmem(0)
        # No barrier ends with a phase that nobody has waited for.
        _wait_turn(buffers, warpgroup, warpgroup == 0)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        config.share_registers(computing=False)
        items, tiles = _for_each_item(config, inputs, functools.partial(_load, config, inputs, buffers))
        pieces.drain(buffers.q.shape[0], items, buffers.q_empty)
        pieces.drain(config.stages, tiles, buffers.k_empty, buffers.v_empty)


def _for_each_item(config: Config, inputs: _Inputs, visit: Any) -> tuple[Any, Any]:
    """Calls visit(item) for this program's blocks; returns how many they were and how many tiles they visited."""
    batches, length, heads, _ = inputs.q.shape
    blocks = pl.cdiv(length, config.query_block)
    programs = min(heads * batches * blocks, config.programs)
    program = lax.axis_index("program")

    def step(number: jax.Array, before: jax.Array) -> jax.Array:
        index = number * programs + program
        # The last blocks of queries have the most causal work: they come first.
        block = blocks - 1 - lax.div(index, heads * batches)
        batch = lax.rem(lax.div(index, heads), batches)
        visits = pieces.read_visits(inputs.schedule, batch, block, descending=True)
        visit(_Item(number, before, batch, lax.rem(index, heads), block, visits))
        return before + visits.count

    items = lax.div(heads * batches * blocks - 1 - program, programs) + 1
    return items, lax.fori_loop(0, items, step, jnp.int32(0))


def _load(config: Config, inputs: _Inputs, buffers: _Buffers, item: _Item) -> None:
    """Queries, then the key and value blocks that they see."""
    kv_head = lax.div(item.head, inputs.q.shape[2] // inputs.k.shape[2])
    stages = buffers.q.shape[0]
    slot = lax.rem(item.number, stages)

    @pl.when(item.number >= stages)
    def _():
        plgpu.barrier_wait(buffers.q_empty.at[slot])

    for group in range(config.warpgroups):
        rows = pl.ds(item.block * config.query_block + group * ROWS, ROWS)
        full = buffers.q_full.at[slot]
        plgpu.copy_gmem_to_smem(inputs.q.at[item.batch, rows, item.head], buffers.q.at[slot, group], full)
        if buffers.query_ids is not None:
            plgpu.copy_gmem_to_smem(inputs.ids.query.at[item.batch, rows], buffers.query_ids.at[slot, group], full)

    def step(index: jax.Array, _: None) -> None:
        count = item.before + index
        slot = lax.rem(count, config.stages)
        part = item.batch, pl.ds(item.visits.tile(index) * config.key_block, config.key_block), kv_head

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.k_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[slot], buffers.k_full.at[slot])
        if buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(inputs.ids.key.at[part[:2]], buffers.key_ids.at[slot], buffers.k_full.at[slot])

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.v_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[slot], buffers.v_full.at[slot])

    lax.fori_loop(0, item.visits.count, step, None)


def _wait_turn(buffers: _Buffers, warpgroup: Any, when: Any = True) -> None:
    """Until it is this warpgroup's turn to give the tensor cores work: while one computes, others do their softmax."""
    if buffers.turn is not None:
        pl.when(when)(lambda: plgpu.barrier_wait(buffers.turn.at[warpgroup]))


def _pass_turn(buffers: _Buffers, warpgroup: Any, when: Any = True) -> None:
    if buffers.turn is not None:
        groups = buffers.q.shape[1]
        pl.when(when)(lambda: plgpu.barrier_arrive(buffers.turn.at[lax.rem(warpgroup + 1, groups)]))


def _free_queries(buffers: _Buffers, number: Any) -> None:
    """Gives the buffer of the item before the `number`-th back, from which its output is stored meanwhile."""

    @pl.when(number > 0)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(buffers.q_empty.at[lax.rem(number - 1, buffers.q.shape[0])])


class _Rows(NamedTuple):
    """What a warpgroup knows of its 64 queries."""

    q: Any
    first_query: jax.Array
    query_ids: jax.Array | None
    item: _Item


class _State(NamedTuple):
    """The softmax of the tiles seen so far; the product of `weights` with its values is still to be added."""

    acc: jax.Array
    maximum: jax.Array
    total: jax.Array  # [rows, _PARTS]
    weights: jax.Array


def _compute(config: Config, inputs: _Inputs, outputs: Any, buffers: _Buffers, item: _Item) -> None:
    """One warpgroup's 64 queries against all the blocks that they see."""
    warpgroup = lax.axis_index("warpgroup")
    slot = lax.rem(item.number, buffers.q.shape[0])
    first_query = item.block * config.query_block + warpgroup * ROWS
    q = buffers.q.at[slot, warpgroup]
    _free_queries(buffers, item.number)
    plgpu.barrier_wait(buffers.q_full.at[slot])
    query_ids = None
    if buffers.query_ids is not None:
        query_ids = plgpu.load(buffers.query_ids.at[slot, warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))
    mine = _Rows(q, first_query, query_ids, item)
    state = _State(
        pieces.zeros(ROWS, q.shape[-1]),
        pieces.row_values(pieces.fill(config) * pieces.late_factor(config), ROWS),
        pieces.zeros(ROWS, _PARTS),
        pieces.zeros(ROWS, config.key_block).astype(q.dtype),
    )
    some = jnp.minimum(item.visits.count, 1)
    state = lax.fori_loop(0, some, functools.partial(_first_tile, config, buffers, mine), state)
    state = item.visits.fold(functools.partial(_attend_tile, config, buffers, mine), state, some)
    state = lax.fori_loop(0, some, functools.partial(_last_product, config, buffers, mine), state)
    _store(config, outputs, buffers, mine, state)


def _scores(config: Config, products: jax.Array) -> jax.Array:
    """Scores less the factor of the softmax, which has to be positive for a row's maximum to commute with it."""
    scores = pieces.cap(config, products)
    return scores if config.factor > 0 else scores * config.factor


def _masked(
    config: Config, buffers: _Buffers, mine: _Rows, index: jax.Array, slot: jax.Array, scores: jax.Array
) -> jax.Array:
    ids = None
    if mine.query_ids is not None:
        key_ids = plgpu.load(buffers.key_ids.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
        ids = pieces.along_rows(mine.query_ids, scores), pieces.along_columns(key_ids, scores)
    first_key = mine.item.visits.tile(index) * config.key_block
    return pieces.mask_tile(config, scores, pieces.fill(config), mine.first_query, first_key, ids)


def _softmax(
    config: Config, scores: jax.Array, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """New maximum and total, the factor for what was summed before, and the float32 weights of the tile."""
    # A weight is one fused multiply-add and one exponential.
    factor = pieces.late_factor(config)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * factor - pieces.along_rows(new_maximum, scores))
    parts = [weights[:, first : first + _PARTS] for first in range(0, weights.shape[1], _PARTS)]
    total = total * pieces.along_rows(shrink, total) + functools.reduce(jnp.add, parts)
    return new_maximum, total, shrink, weights


def _first_tile(config: Config, buffers: _Buffers, mine: _Rows, index: jax.Array, state: _State) -> _State:
    slot = lax.rem(mine.item.before + index, config.stages)
    plgpu.barrier_wait(buffers.k_full.at[slot])

    def issue(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, mine.q, buffers.k.at[slot].transpose((1, 0)))

    scores = _scores(config, pieces.multiply((ROWS, config.key_block), issue))
    scores = _masked(config, buffers, mine, index, slot, scores)
    pieces.release(config, buffers.k_empty.at[slot])
    maximum, total, _, weights = _softmax(config, scores, state.maximum, state.total)
    plgpu.barrier_wait(buffers.v_full.at[slot])
    return _State(state.acc, maximum, total, weights.astype(state.weights.dtype))


def _attend_tile(
    config: Config, buffers: _Buffers, mine: _Rows, masked: bool, index: jax.Array, state: _State
) -> _State:
    """The softmax of this tile while the tensor cores add the product of the one before."""
    count = mine.item.before + index
    slot, slot_before = lax.rem(count, config.stages), lax.rem(count - 1, config.stages)
    warpgroup = lax.axis_index("warpgroup")
    plgpu.barrier_wait(buffers.k_full.at[slot])
    _wait_turn(buffers, warpgroup)

    def issue_scores(scores: Any) -> None:
        plgpu.wgmma(scores, mine.q, buffers.k.at[slot].transpose((1, 0)))

    def consume(products: jax.Array) -> tuple:
        scores = _scores(config, products)
        if masked:
            scores = _masked(config, buffers, mine, index, slot, scores)
        pieces.release(config, buffers.k_empty.at[slot])
        softmax = lax.optimization_barrier(_softmax(config, scores, state.maximum, state.total))
        # The next tile needs the values of this one. Waiting here, and not there, also keeps the compiler from
        # waiting for the product before the softmax: it moves nothing past the loop of a wait.
        plgpu.barrier_wait(buffers.v_full.at[slot])
        return softmax

    (maximum, total, shrink, weights), acc = pieces.multiply_while_adding(
        config,
        (ROWS, config.key_block),
        issue_scores,
        (state.acc, state.weights, buffers.v.at[slot_before]),
        functools.partial(_pass_turn, buffers, warpgroup),
        consume,
    )
    pieces.release(config, buffers.v_empty.at[slot_before])
    acc = acc * pieces.along_rows(shrink, acc)
    return _State(acc, maximum, total, weights.astype(state.weights.dtype))


def _last_product(config: Config, buffers: _Buffers, mine: _Rows, _: jax.Array, state: _State) -> _State:
    slot = lax.rem(mine.item.before + mine.item.visits.count - 1, config.stages)
    (acc,) = pieces.add_products(config, (state.acc,), (lambda: state.weights, buffers.v.at[slot]))
    pieces.release(config, buffers.v_empty.at[slot])
    return state._replace(acc=acc)


def _store(config: Config, outputs: Any, buffers: _Buffers, mine: _Rows, state: _State) -> None:
    """Output and log-sum-exp, by way of the queries' buffer, which `_free_queries` gives back."""
    (out, lse), item = outputs, mine.item
    acc, maximum, total = state.acc, state.maximum, state.total.sum(axis=1)
    empty = maximum < pieces.empty_below(config)
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    mine.q[...] = (acc * pieces.along_rows(inverse, acc)).astype(out.dtype)
    logarithm = (maximum + jnp.log2(jnp.where(empty, 1.0, total))) * (1.0 / pieces.LOG2E)
    sums = buffers.lse.at[lax.rem(item.number, buffers.q.shape[0]), lax.axis_index("warpgroup")]
    sums[...] = jnp.where(empty, -math.inf, logarithm)
    plgpu.commit_smem()
    rows = pl.ds(mine.first_query, ROWS)

    @pl.when(mine.first_query < config.length)
    def _():
        plgpu.copy_smem_to_gmem(mine.q, out.at[item.batch, rows, item.head])
        plgpu.copy_smem_to_gmem(sums, lse.at[item.batch, item.head, rows])
