"""The forward of attention for Hopper: a persistent kernel of one producer and two or three consumer warpgroups.

Every program computes one block of queries after the other, the ones with the most keys first. The producer streams the
queries and the visible blocks of keys and values into rings of shared-memory buffers, well ahead of the consumers; each
of those keeps the running maximum, sum and output of 64 queries in registers. The softmax of a tile runs at the same
time as the product of the weights and values of the tile before (FlashAttention-3, Shah et al., arXiv:2407.08608). A
run of blocks is visited from its last to its first, so that the block that a causal mask cuts comes before the loop.

A consumer has its own loop, and not `Ring.sum_products`: the softmax stands between its two products.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import mosaic_scores as scoring
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic_config import KernelConfig, Visits, read_visits
from pallas_kernels.attention.request import Segments
from pallas_kernels.attention.visible_tiles import key_runs
from pallas_kernels.hopper import pipeline, scheduler, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

_TILE_BYTES = 220 * 2**10
"""Shared memory for tiles, of 227 KiB; the small arrays have what is left."""
_PIECE = 64
"""Columns of an output narrower than the queries that are stored at a time."""
_PARTS = 8
"""Parts of a row's sum, two in each of its threads, which are added up across the threads at the end."""


class _Inputs(NamedTuple):
    """Input arrays of the forward kernel in global memory: q, k, v, the tiles to visit, segment ids and sinks."""

    q: Ref
    k: Ref
    v: Ref
    schedule: tuple[Ref, ...]
    ids: Segments | None
    sinks: Ref | None


class _Outputs(NamedTuple):
    out: Ref
    lse: Ref


class _Buffers(NamedTuple):
    """Shared memory and barriers of the forward kernel.

    The leading dim counts stages, the second dim of `q` and `lse` warpgroups. Outputs leave through the memory of the
    queries; where they are narrower, which TMA cannot store from there, in pieces through `out` [warpgroups, ROWS, 64].
    """

    q: Ref
    lse: Ref
    out: Ref | None
    k: Ref
    v: Ref
    query_ids: Ref | None
    key_ids: Ref | None
    q_full: Ref
    k_full: Ref
    v_full: Ref
    q_empty: Ref
    k_empty: Ref
    v_empty: Ref


class _Item(NamedTuple):
    """A unit of a program's work: a block of queries of one head, the `number`-th that the program computes.

    The program visited `before` tiles for the blocks before it.
    """

    number: Index
    before: Index
    batch: Index
    head: Index
    block: Index
    visits: Visits


def _query_ring(buffers: _Buffers) -> Ring:
    return Ring(buffers.q.shape[0])


def forward(
    config: KernelConfig,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    schedule: tuple[jax.Array, ...],
    segments: Segments | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Compute attention and its log-sum-exp (natural logarithm, -inf for queries without a visible key) on Hopper.

    Args:
        config: Static description of the kernel.
        q: [B, T, N, H]; T is at least a warpgroup's rows. TMA reads zeros beyond the end, and stores nothing there.
        k: [B, S, K, H]; S is at least the key block.
        v: [B, S, K, V].
        schedule: Tiles that each block of queries visits, from `tiles.key_schedule`.
        segments: int32 [B, T] and [B, S], padded to whole blocks, or None.
        sinks: float32 [N], a score of each head that has no value, or None.

    Returns:
        out [B, T, N, V], and lse [B, N, T rounded up to a warpgroup's rows], whose end has no meaning.
    """
    batch, length, num_heads, _ = q.shape
    rows = pl.cdiv(length, ROWS) * ROWS
    items = num_heads * batch * pl.cdiv(length, config.query_block)
    kernel = config.kernel(
        "attention_forward",
        functools.partial(_body, config),
        programs=min(items, config.programs),
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, rows), jnp.float32),
        ),
        scratch_types=_scratch(config, q, v.shape[-1], segments is not None),
    )
    return kernel(_Inputs(q, k, v, schedule, segments, sinks))  # pyright: ignore[reportArgumentType]


def _scratch(config: KernelConfig, q: jax.Array, value_dim: int, packed: bool) -> _Buffers:
    head_dim = q.shape[-1]
    groups = config.warpgroups
    stages = config.stages
    row_bytes = head_dim * q.dtype.itemsize
    narrow = value_dim != head_dim
    out_bytes = groups * ROWS * _PIECE * q.dtype.itemsize if narrow else 0
    left = _TILE_BYTES - out_bytes - stages * config.key_block * (row_bytes + value_dim * q.dtype.itemsize)
    query_stages = 2 if 2 * groups * ROWS * row_bytes <= left else 1
    arrivals = 2 if packed else 1
    return _Buffers(
        q=config.tiled_smem((query_stages, groups, ROWS, head_dim), q.dtype),
        lse=plgpu.SMEM((query_stages, groups, ROWS), jnp.float32),
        out=config.tiled_smem((groups, ROWS, _PIECE), q.dtype) if narrow else None,
        k=config.tiled_smem((stages, config.key_block, head_dim), q.dtype),
        v=config.tiled_smem((stages, config.key_block, value_dim), q.dtype),
        query_ids=plgpu.SMEM((query_stages, groups, ROWS), jnp.int32) if packed else None,
        key_ids=plgpu.SMEM((stages, config.key_block), jnp.int32) if packed else None,
        q_full=plgpu.Barrier(num_arrivals=arrivals * groups, num_barriers=query_stages),
        k_full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=query_stages),
        k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )


def _body(config: KernelConfig, inputs: _Inputs, out: Ref, lse: Ref, *scratch: Ref) -> None:
    buffers = _Buffers(*scratch)

    def consume() -> None:
        compute = functools.partial(_compute, config, inputs.sinks, _Outputs(out, lse), buffers)
        items, _ = _for_each_item(config, inputs, compute)
        _free_queries(buffers, items)
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        items, tiles = _for_each_item(config, inputs, functools.partial(_load, config, inputs, buffers))
        _query_ring(buffers).drain(items, buffers.q_empty)
        config.ring.drain(tiles, buffers.k_empty, buffers.v_empty)

    pipeline.specialize(lax.axis_index("warpgroup"), config.warpgroups, consume, produce)


def _for_each_item(config: KernelConfig, inputs: _Inputs, visit: Callable[[_Item], None]) -> tuple[Index, Index]:
    """Call visit(item) for each block of queries that this program computes; return the numbers of blocks and tiles."""
    batches, length, heads, _ = inputs.q.shape
    blocks = pl.cdiv(length, config.query_block)
    total = heads * batches * blocks
    # If all blocks see all keys, heads are computed one after another, so that a head's keys stay in the L2 cache.
    equal = config.options.mask == Mask(causal=False) and inputs.ids is None
    # The first tile is computed before the others.
    runs = key_runs(config.options.mask, config.blocks, inputs.ids is not None, start=1, descending=True)

    def step(number: Index, index: Index, before: jax.Array) -> jax.Array:
        if equal:
            sequence = lax.div(index, blocks)
            block = lax.rem(index, blocks)
        else:
            # The last blocks of queries have the most causal work: they come first.
            sequence = lax.rem(index, heads * batches)
            block = blocks - 1 - lax.div(index, heads * batches)
        batch = lax.div(sequence, heads)
        head = lax.rem(sequence, heads)
        visits = read_visits(inputs.schedule, batch, block, runs, descending=True)
        visit(_Item(number, before, batch, head, block, visits))
        return before + visits.total

    return scheduler.deal(total, min(total, config.programs), step, jnp.int32(0), alternate=config.alternates)


def _load(config: KernelConfig, inputs: _Inputs, buffers: _Buffers, item: _Item) -> None:
    """Load a block of queries, then the blocks of keys and values that they see, into shared memory."""
    kv_head = lax.div(item.head, inputs.q.shape[2] // inputs.k.shape[2])
    queries = _query_ring(buffers)
    query_slot = queries.slot(item.number)
    queries.acquire(item.number, buffers.q_empty)
    for group in range(config.warpgroups):
        rows = pl.ds(item.block * config.query_block + group * ROWS, ROWS)
        full = buffers.q_full.at[query_slot]
        plgpu.copy_gmem_to_smem(inputs.q.at[item.batch, rows, item.head], buffers.q.at[query_slot, group], full)
        if inputs.ids is not None and buffers.query_ids is not None:
            ids = inputs.ids.query.at[item.batch, rows]
            plgpu.copy_gmem_to_smem(ids, buffers.query_ids.at[query_slot, group], full)

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        part = item.batch, pl.ds(item.visits.tile(index) * config.key_block, config.key_block), kv_head
        acquire(buffers.k_empty)
        plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[slot], buffers.k_full.at[slot])
        if inputs.ids is not None and buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(inputs.ids.key.at[part[:2]], buffers.key_ids.at[slot], buffers.k_full.at[slot])
        acquire(buffers.v_empty)
        plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[slot], buffers.v_full.at[slot])

    config.ring.produce(item.before, item.visits.total, load)


def _free_queries(buffers: _Buffers, number: Index) -> None:
    """Release the query buffer of the previous block, once that block's output has been stored from it."""

    @pl.when(number > 0)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(buffers.q_empty.at[_query_ring(buffers).slot(number - 1)])


class _Rows(NamedTuple):
    """The 64 queries that a warpgroup computes attention for."""

    q: Ref
    first_query: Index
    query_ids: jax.Array | None
    item: _Item


class _State(NamedTuple):
    """State of the online softmax over the tiles visited so far.

    `acc` is one tile behind: the last tile's `weights` times its values is not added yet.

    Attributes:
        acc: Sum of the weighted values, [rows, H].
        maximum: Maximum of each row's scores, in base 2.
        total: Sum of each row's weights in parts, [rows, _PARTS].
        weights: Weights of the last tile, [rows, keys].
    """

    acc: jax.Array
    maximum: jax.Array
    total: jax.Array
    weights: jax.Array


def _compute(config: KernelConfig, sinks: Ref | None, outputs: _Outputs, buffers: _Buffers, item: _Item) -> None:
    """Attend from this warpgroup's 64 queries to all the blocks of keys that they see."""
    warpgroup = lax.axis_index("warpgroup")
    slot = _query_ring(buffers).slot(item.number)
    first_query = item.block * config.query_block + warpgroup * ROWS
    q = buffers.q.at[slot, warpgroup]
    _free_queries(buffers, item.number)
    plgpu.barrier_wait(buffers.q_full.at[slot])
    query_ids = None
    if buffers.query_ids is not None:
        query_ids = wgmma.load_rows(buffers.query_ids.at[slot, warpgroup])
    rows = _Rows(q, first_query, query_ids, item)
    state = _State(
        wgmma.zeros(ROWS, buffers.v.shape[-1]),
        wgmma.filled_rows(scoring.fill(config) * scoring.late_factor(config), ROWS),
        wgmma.zeros(ROWS, _PARTS),
        wgmma.zeros(ROWS, config.key_block).astype(q.dtype),
    )
    start: Index = 0
    if _hides_tiles(config):
        start = _hidden_tiles(config, rows)
        lax.fori_loop(0, start, functools.partial(_pass_tile, config, buffers, item), None)
    end = start + jnp.minimum(item.visits.total - start, 1)
    state = lax.fori_loop(start, end, functools.partial(_first_tile, config, buffers, rows), state)
    state = item.visits.fold(functools.partial(_attend_tile, config, buffers, rows), state, end)
    state = lax.fori_loop(start, end, functools.partial(_last_product, config, buffers, rows), state)
    _store(config, None if sinks is None else sinks[item.head], outputs, buffers, rows, state)


def _hides_tiles(config: KernelConfig) -> bool:
    """Return whether any block of queries may visit a tile that shows nothing to one of its warpgroups.

    Otherwise the kernel has no loop that skips such tiles.
    """
    if pl.cdiv(config.length, ROWS) % config.warpgroups:
        return True
    mask = config.options.mask
    if not (mask.causal and mask.is_band):
        return False
    ends = np.minimum(np.arange(0, config.length, ROWS) + ROWS, config.length) + config.key_length - config.length
    last = (np.maximum(ends - 1, 0) // config.key_block).reshape(-1, config.warpgroups)
    return bool((last[:, :-1] < last[:, -1:]).any())


def _hidden_tiles(config: KernelConfig, rows: _Rows) -> Index:
    """Return how many of a block's first visits show nothing to this warpgroup's queries, only to other warpgroups'.

    That is all of them for a warpgroup beyond the last query, and those of later keys under a causal mask.
    """
    total = rows.item.visits.total
    hidden = jnp.int32(0)
    if config.options.mask.causal and config.options.mask.is_band:
        last = jnp.maximum(rows.first_query + ROWS - 1 + config.key_length - config.length, 0)
        hidden = rows.item.visits.tile(0) - lax.div(last, config.key_block)
    hidden = jnp.minimum(jnp.maximum(hidden, 0), total)
    return jnp.where(rows.first_query < config.length, hidden, total)


def _pass_tile(config: KernelConfig, buffers: _Buffers, item: _Item, index: Index, _: None) -> None:
    """Release the buffers of a tile that shows nothing to this warpgroup's queries."""
    slot = config.ring.slot(item.before + index)
    plgpu.barrier_wait(buffers.k_full.at[slot])
    config.ring.release(slot, buffers.k_empty)
    plgpu.barrier_wait(buffers.v_full.at[slot])
    config.ring.release(slot, buffers.v_empty)


def _scores(config: KernelConfig, products: jax.Array) -> jax.Array:
    """Return the (soft-capped) scores without the positive factor that the softmax applies (`scoring.late_factor`)."""
    scores = scoring.cap(config, products)
    factor = scoring.base2_factor(config)
    return scores if factor > 0 else scores * factor


def _masked(
    config: KernelConfig, buffers: _Buffers, rows: _Rows, index: Index, slot: Index, scores: jax.Array
) -> jax.Array:
    ids = None
    if rows.query_ids is not None and buffers.key_ids is not None:
        key_ids = wgmma.load_columns(buffers.key_ids.at[slot])
        ids = wgmma.broadcast_row_values(rows.query_ids, scores), wgmma.broadcast_column_values(key_ids, scores)
    first_key = rows.item.visits.tile(index) * config.key_block
    return scoring.mask_tile(config, scores, scoring.fill(config), rows.first_query, first_key, ids)


def _softmax(
    config: KernelConfig, scores: jax.Array, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Update the online softmax by a tile: return row maxima, row sums, the factor to rescale old sums, and weights."""
    # A weight is one fused multiply-add and one exponential.
    factor = scoring.late_factor(config)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * factor - wgmma.broadcast_row_values(new_maximum, scores))
    parts = [weights[:, first : first + _PARTS] for first in range(0, weights.shape[1], _PARTS)]
    total = total * wgmma.broadcast_row_values(shrink, total) + functools.reduce(jnp.add, parts)
    return new_maximum, total, shrink, weights


def _first_tile(config: KernelConfig, buffers: _Buffers, rows: _Rows, index: Index, state: _State) -> _State:
    """Compute the softmax of a query block's first tile, for which there is no earlier matmul to overlap with."""
    slot = config.ring.slot(rows.item.before + index)
    plgpu.barrier_wait(buffers.k_full.at[slot])

    def start(accumulator: Accumulator) -> None:
        accumulator.add(rows.q, buffers.k.at[slot].transpose((1, 0)))

    scores = _scores(config, wgmma.multiply((ROWS, config.key_block), start))
    scores = _masked(config, buffers, rows, index, slot, scores)
    config.ring.release(slot, buffers.k_empty)
    maximum, total, _, weights = _softmax(config, scores, state.maximum, state.total)
    plgpu.barrier_wait(buffers.v_full.at[slot])
    return _State(state.acc, maximum, total, weights.astype(state.weights.dtype))


def _attend_tile(
    config: KernelConfig, buffers: _Buffers, rows: _Rows, masked: bool, index: Index, state: _State
) -> _State:
    """Compute a tile's softmax while the tensor cores multiply the weights and values of the tile before."""
    count = rows.item.before + index
    slot = config.ring.slot(count)
    slot_before = config.ring.slot(count - 1)
    plgpu.barrier_wait(buffers.k_full.at[slot])

    def softmax(products: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        scores = _scores(config, products)
        if masked:
            scores = _masked(config, buffers, rows, index, slot, scores)
        config.ring.release(slot, buffers.k_empty)
        result = lax.optimization_barrier(_softmax(config, scores, state.maximum, state.total))
        # The next tile needs the values of this one. Waiting here, and not there, also keeps the compiler from
        # waiting for the product before the softmax: it moves nothing past the loop of a wait.
        plgpu.barrier_wait(buffers.v_full.at[slot])
        return result

    def multiply(scores: Accumulator, sums: Accumulator) -> tuple[tuple[jax.Array, ...], jax.Array]:
        scores.add(rows.q, buffers.k.at[slot].transpose((1, 0)))
        sums.add(state.weights, buffers.v.at[slot_before])
        result = softmax(scores.load(pending=1))
        return result, sums.load()

    (maximum, total, shrink, weights), acc = wgmma.accumulate(
        multiply, (ROWS, config.key_block), state.acc, interpret=config.interpret
    )
    config.ring.release(slot_before, buffers.v_empty)
    acc = acc * wgmma.broadcast_row_values(shrink, acc)
    return _State(acc, maximum, total, weights.astype(state.weights.dtype))


def _last_product(config: KernelConfig, buffers: _Buffers, rows: _Rows, _: Index, state: _State) -> _State:
    """Add the product of weights and values of the last tile to the output."""
    slot = config.ring.slot(rows.item.before + rows.item.visits.total - 1)
    operands = (lambda: state.weights), buffers.v.at[slot]
    (acc,) = wgmma.add_products((state.acc,), operands, interpret=config.interpret)
    config.ring.release(slot, buffers.v_empty)
    return state._replace(acc=acc)


def _store(
    config: KernelConfig,
    sink: jax.Array | None,
    outputs: _Outputs,
    buffers: _Buffers,
    rows: _Rows,
    state: _State,
) -> None:
    """Store output and log-sum-exp of 64 queries, through shared memory."""
    (out, lse), item = outputs, rows.item
    acc = state.acc
    maximum = state.maximum
    total = state.total.sum(axis=1)
    empty = maximum < scoring.empty_row_threshold(config)
    if sink is None:
        inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
        logarithm = jnp.where(empty, -math.inf, maximum + jnp.log2(jnp.where(empty, 1.0, total)))
    else:  # One more score, whose value is 0; for a row that sees no key it is the only one.
        sink = sink * scoring.LOG2E
        top = jnp.maximum(maximum, sink)
        shrink = jnp.exp2(maximum - top)
        total = total * shrink + jnp.exp2(sink - top)
        inverse = shrink / total
        logarithm = top + jnp.log2(total)
    result = (acc * wgmma.broadcast_row_values(inverse, acc)).astype(out.dtype)
    if buffers.out is None:
        rows.q[...] = result
    sums = buffers.lse.at[_query_ring(buffers).slot(item.number), lax.axis_index("warpgroup")]
    sums[...] = logarithm * (1.0 / scoring.LOG2E)
    plgpu.commit_smem()
    stored = pl.ds(rows.first_query, ROWS)
    here = rows.first_query < config.length

    @pl.when(here)
    def _():
        if buffers.out is None:
            plgpu.copy_smem_to_gmem(rows.q, out.at[item.batch, stored, item.head])
        plgpu.copy_smem_to_gmem(sums, lse.at[item.batch, item.head, stored])

    if buffers.out is None:
        return
    staging = buffers.out.at[lax.axis_index("warpgroup")]
    for first in range(0, result.shape[1], _PIECE):
        if first:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = result[:, first : first + _PIECE]
        plgpu.commit_smem()

        @pl.when(here)
        def _(first: int = first) -> None:
            plgpu.copy_smem_to_gmem(staging, out.at[item.batch, stored, item.head, pl.ds(first, _PIECE)])
