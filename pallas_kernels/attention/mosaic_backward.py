"""Backward kernels of attention for Hopper: one that computes all gradients, and those for dK and dV.

Scores are computed again from q, k and the log-sum-exp. In the kernel for dK and dV a warpgroup owns 64 keys and visits
the queries of every head of the group that see them, so that grouped heads need no further sum.

The fused kernel also adds its part of dQ to a float32 array in global memory, five products for each tile instead of
seven: the two warpgroups exchange the gradients of their scores through shared memory, and each computes half of the
tile's dQ for all 128 keys (as FlashAttention-3 does, Shah et al., arXiv:2407.08608). The order of these sums depends on
timing, so the last bit of dQ may differ from run to run. Otherwise dQ has its own kernel (`mosaic_query_gradient`), all
sums stay in registers, and every bit is the same in each run.

A consumer has its own loops instead of `Ring.sum_products`: softmax and its gradient are between its products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import mosaic_scores as scoring
from pallas_kernels.attention.mosaic_config import KernelConfig, read_visits
from pallas_kernels.attention.mosaic_residuals import Inputs, Place, Residuals, Weighed
from pallas_kernels.attention.request import Segments
from pallas_kernels.attention.visible_tiles import query_runs
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

_EXCHANGES = 3
"""Tiles whose score gradients stay in shared memory.

These are this one's, those of the tile before, which the other warpgroup may read, and that warpgroup's next.
"""


# --- dK and dV --------------------------------------------------------------------------------------------------


class _KeyBuffers(NamedTuple):
    """Shared memory and barriers of the kernel for dK and dV.

    The leading dim counts warpgroups for keys, else stages.

    The last three belong to the fused kernel: gradients of the scores of both warpgroups, `_EXCHANGES` tiles deep, a
    part of dQ for each warpgroup, and the barrier at which both have exchanged their gradients.
    """

    k: Ref
    v: Ref
    q: Ref
    d_out: Ref
    lse: Ref
    delta: Ref
    key_ids: Ref | None
    query_ids: Ref | None
    own_full: Ref
    q_full: Ref
    d_out_full: Ref
    delta_full: Ref
    q_empty: Ref
    d_out_empty: Ref
    exchange: Ref
    d_q: Ref
    exchanged: Ref


def key_value_gradient(
    config: KernelConfig,
    residuals: Residuals,
    schedule: tuple[jax.Array, ...],
    segments: Segments | None,
    wanted: tuple[str, ...] = ("d_k", "d_v"),
    d_q: jax.Ref | None = None,
) -> tuple[Float[Array, "B S K H"], ...]:
    """Compute the gradients dK and dV of attention, or one of them; if `d_q` is given, also accumulate dQ into it.

    Args:
        config: Static description of the kernel.
        residuals: Arrays of the forward.
        schedule: Tiles that each block of keys visits, from `tiles.query_schedule`.
        segments: int32 [B, T] and [B, S], or None.
        wanted: Which of "d_k" and "d_v" are computed: at large head dims the registers have room for one accumulator.
        d_q: Reference to float32 [copies, B, T, N, H] (`copies_of_query_gradient`), to which dQ less the factor
            `Options.scale` is added; None to leave dQ out.

    Returns:
        The wanted gradients, [B, S, K, H] each; float32 [parts, B, S, K, H], still to be summed over the parts, if
        `config.head_parts` is more than 1. With `config.tail` as many float32 arrays follow,
        [parts, keys of the tail, K, H]: their sums over the parts are the gradients of the last keys of the last batch
        entry, which the first arrays do not contain.
    """
    batch, key_length, num_kv_heads, head_dim = residuals.k.shape
    dtype = residuals.k.dtype
    groups = config.warpgroups
    stages = config.stages
    packed = segments is not None
    columns = head_dim if d_q is None else _part_columns(config, head_dim)
    query_tile = config.tiled_smem((stages, config.query_block, head_dim), dtype, columns)
    query_row = plgpu.SMEM((stages, config.query_block), jnp.float32)
    own_tile = config.tiled_smem((groups, ROWS, head_dim), dtype, columns)
    scratch = _KeyBuffers(
        k=own_tile,
        v=own_tile,
        q=query_tile,
        d_out=query_tile,
        lse=query_row,
        delta=query_row,
        key_ids=plgpu.SMEM((groups, ROWS), jnp.int32) if packed else None,
        query_ids=plgpu.SMEM((stages, config.query_block), jnp.int32) if packed else None,
        own_full=plgpu.Barrier(num_arrivals=3 if packed else 2, num_barriers=groups),
        q_full=plgpu.Barrier(num_arrivals=3 if packed else 2, num_barriers=stages),
        d_out_full=plgpu.Barrier(num_barriers=stages),
        delta_full=plgpu.Barrier(num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        d_out_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        exchange=config.tiled_smem((_EXCHANGES, groups, ROWS, config.query_block), dtype, columns),
        d_q=config.tiled_smem((groups, ROWS, columns), jnp.float32),
        exchanged=plgpu.Barrier(num_arrivals=groups),
    )
    if d_q is None:
        scratch = scratch._replace(exchange=None, d_q=None, exchanged=None)
    parts = config.head_parts
    if residuals.q.shape[2] % (num_kv_heads * parts) or (parts > 1 and d_q is None):
        raise ValueError(f"{parts} parts of the query heads need the fused kernel, and must divide a key head's share")
    like_k = jax.ShapeDtypeStruct(residuals.k.shape, dtype)
    if parts > 1:
        like_k = jax.ShapeDtypeStruct((parts, *residuals.k.shape), jnp.float32)
    blocks = pl.cdiv(key_length, config.key_block)
    results = (like_k,) * len(wanted)
    grid = {"head": num_kv_heads * parts, "block": blocks, "batch": batch}
    if config.tail is not None:
        if config.tail.parts < 2 or parts > 1:
            raise ValueError(
                f"a tail needs two or more parts and head_parts=1; got {config.tail} and head_parts={parts}"
            )
        grid = {"head": num_kv_heads, "row": blocks * batch + config.tail.blocks * (config.tail.parts - 1)}
        shape = config.tail.parts, config.tail.blocks * config.key_block, num_kv_heads, head_dim
        results += (jax.ShapeDtypeStruct(shape, jnp.float32),) * len(wanted)
    kernel = config.kernel(
        f"attention_{'_'.join(wanted)}" if d_q is None else "attention_backward",
        functools.partial(_key_body, config, wanted),
        out_type=results,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        synchronises=d_q is not None,
    )
    return kernel(residuals, schedule, segments, d_q)


def copies_of_query_gradient(config: KernelConfig) -> int:
    """Return the number of float32 buffers in which the fused backward kernel sums dQ; the caller adds them up.

    Interpret mode cannot add to global memory: there each block of keys stores to its own array.
    """
    return -(-config.key_length // config.key_block) if config.interpret else 1


def _part_columns(config: KernelConfig, head_dim: int) -> int:
    """Return how many columns of a tile's dQ a warpgroup computes: half of them if a tile has 64 queries, else all."""
    return head_dim if config.query_block > ROWS else head_dim // config.warpgroups


def _key_body(
    config: KernelConfig,
    wanted: tuple[str, ...],
    inputs: Inputs,
    schedule: tuple[Ref, ...],
    ids: Segments | None,
    d_q: Ref | None,
    *refs: Ref,
) -> None:
    inputs = Inputs(*inputs)
    outputs = dict(zip(wanted, refs, strict=False))
    tails = {} if config.tail is None else dict(zip(wanted, refs[len(wanted) :], strict=False))
    buffers = _KeyBuffers(*refs[len(outputs) + len(tails) :])
    warpgroup = lax.axis_index("warpgroup")
    batch, head, block, part, parts = _key_row(config, inputs)
    # The first blocks of keys are seen by most queries under a causal mask: they start first.
    # Each block of queries for all query heads of the key head, from the last block on: programs that run at the same
    # time then read the same queries at about the same time, from the L2 cache.
    group = inputs.q.shape[2] // lax.axis_size("head")
    runs = query_runs(config.options.mask, config.blocks, ids is not None, descending=True)
    visits = read_visits(schedule, batch, block, runs, descending=True)
    if config.tail is not None:
        visits = visits.part(part, parts)
    place = Place(batch, head, block * config.key_block, visits.repeat(group))
    targets = _Targets(outputs, tails, part, parts)
    pipeline.specialize(
        warpgroup,
        config.warpgroups,
        functools.partial(_key_compute, config, inputs, ids, buffers, place, targets, d_q),
        functools.partial(_key_load, config, inputs, ids, buffers, place),
    )


class _Targets(NamedTuple):
    """Arrays in global memory to which a program of the fused backward writes dK and dV of its block of keys.

    Attributes:
        outputs: Gradients by name, [B, S, K, H] each; written if the block has one program.
        tails: Float32 gradients by name, see `key_value_gradient`; written if several programs share the block. Empty
            without `KernelConfig.tail`.
        part: Index of this program among those that share its block.
        parts: Number of programs that share the block.
    """

    outputs: dict[str, Ref]
    tails: dict[str, Ref]
    part: Index
    parts: Index


def _key_row(config: KernelConfig, inputs: Inputs) -> tuple[Index, ...]:
    """Return this program's batch entry, key head, key block, part of that block's visits, and number of such parts.

    The programs of `config.tail` come last.
    """
    head = lax.axis_index("head")
    if config.tail is None:
        return lax.axis_index("batch"), head, lax.axis_index("block"), 0, 1
    row, blocks, (count, parts) = lax.axis_index("row"), pl.cdiv(config.key_length, config.key_block), config.tail
    rows = blocks * inputs.k.shape[0] - count
    divided = row >= rows
    part = jnp.where(divided, lax.rem(row - rows, parts), 0)
    row = jnp.where(divided, rows + lax.div(row - rows, parts), row)
    return lax.div(row, blocks), head, lax.rem(row, blocks), part, jnp.where(divided, parts, 1)


def _key_load(config: KernelConfig, inputs: Inputs, ids: Segments | None, buffers: _KeyBuffers, place: Place) -> None:
    """Load the blocks of queries that see this program's keys, for every query head that shares the key head."""
    group = inputs.q.shape[2] // lax.axis_size("head")
    visits = place.visits

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        head = place.head * group + lax.rem(index, group)
        rows = pl.ds(visits.tile(index) * config.query_block, config.query_block)
        acquire(buffers.q_empty, buffers.d_out_empty)
        full = buffers.q_full.at[slot]
        plgpu.copy_gmem_to_smem(inputs.q.at[place.batch, rows, head], buffers.q.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.lse.at[place.batch, head, rows], buffers.lse.at[slot], full)
        if ids is not None and buffers.query_ids is not None:
            plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[slot], full)
        d_out_full = buffers.d_out_full.at[slot]
        delta_full = buffers.delta_full.at[slot]
        plgpu.copy_gmem_to_smem(inputs.d_out.at[place.batch, rows, head], buffers.d_out.at[slot], d_out_full)
        plgpu.copy_gmem_to_smem(inputs.delta.at[place.batch, head, rows], buffers.delta.at[slot], delta_full)

    config.ring.produce(0, visits.total, load)
    config.ring.drain(visits.total, buffers.q_empty, buffers.d_out_empty)


def _key_compute(
    config: KernelConfig,
    inputs: Inputs,
    ids: Segments | None,
    buffers: _KeyBuffers,
    place: Place,
    targets: _Targets,
    d_q: Ref | None,
) -> None:
    """Compute and store dK and dV of 64 keys, as one computing warpgroup of the kernel for dK and dV."""
    warpgroup = lax.axis_index("warpgroup")
    first_key = place.first + warpgroup * ROWS
    keys = pl.ds(first_key, ROWS)
    full = buffers.own_full.at[warpgroup]
    part = place.batch, keys, lax.div(place.head, config.head_parts)
    plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[warpgroup], full)
    plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[warpgroup], full)
    if ids is not None and buffers.key_ids is not None:
        plgpu.copy_gmem_to_smem(ids.key.at[place.batch, keys], buffers.key_ids.at[warpgroup], full)
    plgpu.barrier_wait(full)
    key_ids = None if buffers.key_ids is None else wgmma.load_rows(buffers.key_ids.at[warpgroup])
    head_dim = inputs.k.shape[3]
    group = inputs.q.shape[2] // lax.axis_size("head")

    def step(masked: bool, index: Index, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        visited = _Visited(config.ring.slot(index), place.visits.tile(index), first_key, key_ids, masked)
        return _key_tile(config, buffers, state, visited)

    outputs = targets.outputs
    if d_q is None:
        state = place.visits.fold(step, {name: wgmma.zeros(ROWS, head_dim) for name in outputs})
    else:
        state = _visit_fused(config, buffers, place, (first_key, key_ids), group, d_q)
    factors = {"d_k": config.options.scale, "d_v": 1.0}
    if config.head_parts > 1:
        target = lax.rem(place.head, config.head_parts), *part
        for name, ref in outputs.items():
            _store_part(ref, target, buffers.d_q.at[warpgroup], state[name] * factors[name])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
    staging = {"d_k": buffers.k.at[warpgroup], "d_v": buffers.v.at[warpgroup]}

    def store() -> None:
        for name, ref in outputs.items():
            staging[name][...] = (state[name] * factors[name]).astype(ref.dtype)
        plgpu.commit_smem()
        for name, ref in outputs.items():
            plgpu.copy_smem_to_gmem(staging[name], ref.at[part])

    if config.tail is None:
        store()
    else:
        pl.when(targets.parts == 1)(store)
        first = (pl.cdiv(config.key_length, config.key_block) - config.tail.blocks) * config.key_block
        target = targets.part, pl.ds(first_key - first, ROWS), place.head

        @pl.when(targets.parts > 1)
        def _():
            for name, ref in targets.tails.items():
                _store_part(ref, target, buffers.d_q.at[warpgroup], state[name] * factors[name])

    # The program may end, and the next one begin, once its shared memory has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_part(ref: Ref, target: tuple[Any, ...], staging: Ref, values: jax.Array) -> None:
    """Store float32 values [64, H] at `target` in global memory, through a shared-memory buffer of fewer columns."""
    width = staging.shape[-1]
    for first in range(0, values.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = values[:, first : first + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, ref.at[(*target, pl.ds(first, width))])


class _Visited(NamedTuple):
    """Block of queries whose contribution to dK and dV is computed, with its slot in the shared-memory buffers."""

    slot: Index
    tile: Index
    first_key: Index
    key_ids: jax.Array | None
    masked: bool | jax.Array


def _start_products(
    buffers: _KeyBuffers, visited: _Visited, scores: Accumulator, d_weights: Accumulator | None, wait: bool = True
) -> None:
    """Start the matmuls for a tile's scores and, if wanted, its softmax weights' gradient, both [keys, queries].

    `wait` says that the tile's operands have not been waited for yet.
    """
    warpgroup = lax.axis_index("warpgroup")
    slot = visited.slot
    if wait:
        plgpu.barrier_wait(buffers.q_full.at[slot])
    scores.add(buffers.k.at[warpgroup], buffers.q.at[slot].transpose((1, 0)))
    if wait:
        plgpu.barrier_wait(buffers.d_out_full.at[slot])
    if d_weights is not None:
        d_weights.add(buffers.v.at[warpgroup], buffers.d_out.at[slot].transpose((1, 0)))


def _weigh(config: KernelConfig, buffers: _KeyBuffers, visited: _Visited, products: jax.Array) -> Weighed:
    """Return a tile's softmax weights [keys, queries] from the products q.k, and the scores if they are soft-capped."""
    capped = scoring.cap(config, products)
    lse = wgmma.broadcast_column_values(wgmma.load_columns(buffers.lse.at[visited.slot]), capped)
    weights = jnp.exp2(capped * scoring.base2_factor(config) - lse)
    capped = None if config.options.soft_cap is None else capped

    def mask(weights: jax.Array) -> jax.Array:
        pair = None
        if visited.key_ids is not None and buffers.query_ids is not None:
            query_ids = wgmma.load_columns(buffers.query_ids.at[visited.slot])
            key_ids = wgmma.broadcast_row_values(visited.key_ids, weights)
            pair = wgmma.broadcast_column_values(query_ids, weights), key_ids
        first_query = visited.tile * config.query_block
        return scoring.mask_tile(config, weights, 0.0, first_query, visited.first_key, pair, keys_are_rows=True)

    if isinstance(visited.masked, bool):
        return (mask(weights) if visited.masked else weights), capped
    return lax.cond(visited.masked, mask, lambda weights: weights, weights), capped


def _both_gradients(config: KernelConfig, buffers: _KeyBuffers, visited: _Visited) -> tuple[jax.Array, jax.Array]:
    """Return a tile's softmax weights and the gradient of its scores, float32 [keys, queries]."""

    def weigh(products: jax.Array) -> Weighed:
        weights = lax.optimization_barrier(_weigh(config, buffers, visited, products))
        # Delta has its own barrier, waited for here: the compiler moves nothing past the loop of a wait, and
        # would otherwise wait for the second product before it computes the weights.
        plgpu.barrier_wait(buffers.delta_full.at[visited.slot])
        return weights

    start = functools.partial(_start_products, buffers, visited)
    (weights, capped), d_weights = wgmma.multiply_two((ROWS, config.query_block), start, weigh)
    delta = wgmma.broadcast_column_values(wgmma.load_columns(buffers.delta.at[visited.slot]), weights)
    return weights, scoring.score_gradient(weights, d_weights, delta, capped)


def _only_weights(config: KernelConfig, buffers: _KeyBuffers, visited: _Visited) -> jax.Array:
    """Return a tile's softmax weights, float32 [keys, queries], without their gradient: all that dV needs."""

    def start(scores: Accumulator) -> None:
        _start_products(buffers, visited, scores, None)

    products = wgmma.multiply((ROWS, config.query_block), start)
    plgpu.barrier_wait(buffers.delta_full.at[visited.slot])
    return _weigh(config, buffers, visited, products)[0]


def _key_tile(
    config: KernelConfig, buffers: _KeyBuffers, state: dict[str, jax.Array], visited: _Visited
) -> dict[str, jax.Array]:
    """Return the sums in `state` (dK, dV or both) with the contribution of one block of queries added."""
    q = buffers.q.at[visited.slot]
    d_out = buffers.d_out.at[visited.slot]
    operands = {}
    if "d_k" in state:
        weights, gradient = _both_gradients(config, buffers, visited)
        operands["d_k"] = lambda: gradient.astype(q.dtype), q
    else:
        weights = _only_weights(config, buffers, visited)
    if "d_v" in state:
        operands["d_v"] = lambda: weights.astype(d_out.dtype), d_out
    order = [name for name in ("d_v", "d_k") if name in state]
    sums = wgmma.add_products(
        tuple(state[name] for name in order), *(operands[name] for name in order), interpret=config.interpret
    )
    config.ring.release(visited.slot, buffers.d_out_empty, buffers.q_empty)
    updated = dict(zip(order, sums, strict=True))
    return {name: updated[name] for name in state}


# --- dQ in the same kernel --------------------------------------------------------------------------------------


class _Before(NamedTuple):
    """The tile visited before the current one, whose contribution to dQ is still to be computed."""

    tile: Index
    member: Index


def _visit_fused(
    config: KernelConfig,
    buffers: _KeyBuffers,
    place: Place,
    keys: tuple[Index, jax.Array | None],
    group: int,
    d_q: Ref,
) -> dict[str, jax.Array]:
    """Compute dK and dV of this warpgroup's keys, and add the queries' dQ to `d_q` in global memory.

    Args:
        config: Static description of the kernel.
        buffers: Shared memory.
        place: Keys of the program, and the blocks of queries that visit them.
        keys: This warpgroup's first key, and the segment numbers of its keys.
        group: Query heads for each kv head.
        d_q: [copies, B, T, N, H].
    """
    (first_key, key_ids), visits = keys, place.visits
    # The tile before the first counts as exchanged.
    plgpu.barrier_arrive(buffers.exchanged)

    def step(masked: bool | jax.Array, index: Index, state: tuple) -> tuple:
        sums, before = state
        tile = visits.tile(index)
        visited = _Visited(config.ring.slot(index), tile, first_key, key_ids, masked)
        add = functools.partial(_add_to_queries, config, buffers, d_q, place, before, index > 0)
        return _fused_tile(config, buffers, sums, visited, index, add), _Before(tile, lax.rem(index, group))

    zeros = wgmma.zeros(ROWS, buffers.k.shape[-1])
    start = {"d_k": zeros, "d_v": zeros}, _Before(jnp.int32(0), jnp.int32(0))
    sums, before = visits.fold_in_one_loop(step, start)
    count = visits.total
    plgpu.barrier_wait(buffers.exchanged)

    def multiply(product: Accumulator) -> jax.Array:
        _start_query_gradient(config, buffers, count, product)
        return product.load()

    product = wgmma.accumulate(multiply, _query_part_shape(config, buffers), interpret=config.interpret)
    _add_to_queries(config, buffers, d_q, place, before, count > 0, product)
    # The other warpgroup may still read this one's keys, which the results are about to replace.
    plgpu.barrier_arrive(buffers.exchanged)
    plgpu.barrier_wait(buffers.exchanged)
    return sums


def _query_part(config: KernelConfig, head_dim: int) -> tuple[Any, Any]:
    """Return the slices (rows, columns) of a tile's dQ that this warpgroup computes; the other computes the rest."""
    warpgroup = lax.axis_index("warpgroup")
    columns = _part_columns(config, head_dim)
    if config.query_block > ROWS:
        return pl.ds(warpgroup * ROWS, ROWS), pl.ds(0, columns)
    return pl.ds(0, ROWS), pl.ds(warpgroup * columns, columns)


def _query_part_shape(config: KernelConfig, buffers: _KeyBuffers) -> tuple[int, int]:
    return ROWS, _part_columns(config, buffers.q.shape[-1])


def _start_query_gradient(config: KernelConfig, buffers: _KeyBuffers, count: Index, product: Accumulator) -> None:
    """Start the matmuls for this warpgroup's rows or columns of dQ of the previous tile, number `count` - 1."""
    rows, columns = _query_part(config, buffers.q.shape[-1])
    turn = lax.rem(count + _EXCHANGES - 1, _EXCHANGES)
    for group in range(config.warpgroups):
        scores = buffers.exchange.at[turn, group, :, rows].transpose((1, 0))
        product.add(scores, buffers.k.at[group, :, columns])


def _add_to_queries(
    config: KernelConfig,
    buffers: _KeyBuffers,
    d_q: Ref,
    place: Place,
    before: _Before,
    exists: bool | jax.Array,
    product: jax.Array,
) -> None:
    """Add this warpgroup's rows or columns of the previous tile's dQ, if there is one, to `d_q` in global memory."""
    rows, columns = _query_part(config, buffers.q.shape[-1])
    staging = buffers.d_q.at[lax.axis_index("warpgroup")]
    group = d_q.shape[3] // lax.axis_size("head")
    copy = lax.div(place.first, config.key_block) if config.interpret else 0
    queries = pl.ds(before.tile * config.query_block + rows.start, ROWS)
    target = d_q.at[copy, place.batch, queries, place.head * group + before.member, columns]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = product
    plgpu.commit_smem()

    @pl.when(exists)
    def _():
        plgpu.copy_smem_to_gmem(staging, target, reduction_op=None if config.interpret else "add")


def _fused_tile(
    config: KernelConfig,
    buffers: _KeyBuffers,
    sums: dict[str, jax.Array],
    visited: _Visited,
    count: Index,
    add: Callable[[jax.Array], None],
) -> dict[str, jax.Array]:
    """Add a query block's contribution to dK and dV; meanwhile compute the previous block's dQ and pass it to `add`.

    One block later the other warpgroup has long exchanged its part, so that neither waits for the other.
    """
    warpgroup = lax.axis_index("warpgroup")
    slot = visited.slot
    q = buffers.q.at[slot]
    d_out = buffers.d_out.at[slot]

    def differentiate(weighed: Weighed, d_weights: jax.Array) -> jax.Array:
        plgpu.barrier_wait(buffers.delta_full.at[slot])
        delta = wgmma.broadcast_column_values(wgmma.load_columns(buffers.delta.at[slot]), d_weights)
        gradient = scoring.score_gradient(weighed[0], d_weights, delta, weighed[1]).astype(q.dtype)
        plgpu.barrier_wait(buffers.exchanged)
        buffers.exchange.at[lax.rem(count, _EXCHANGES), warpgroup][...] = gradient
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.exchanged)
        return gradient

    def multiply(
        scores: Accumulator, d_weights: Accumulator, d_v: Accumulator, d_k: Accumulator
    ) -> tuple[jax.Array, jax.Array]:
        _start_products(buffers, visited, scores, d_weights, wait=False)
        weighed = _weigh(config, buffers, visited, scores.load(pending=1))
        left = weighed[0].astype(d_out.dtype)
        gradient = differentiate(weighed, d_weights.load())
        d_v.add(left, d_out)

        def multiply_queries(product: Accumulator) -> None:
            _start_query_gradient(config, buffers, count, product)
            d_k.add(gradient, q)
            add(product.load(pending=1))

        wgmma.accumulate(multiply_queries, _query_part_shape(config, buffers), interpret=config.interpret)
        return d_v.load(), d_k.load()

    tile = (ROWS, config.query_block)
    # Waited for here, the accumulators are zero where their first product starts, which then takes no zeros.
    plgpu.barrier_wait(buffers.q_full.at[slot])
    plgpu.barrier_wait(buffers.d_out_full.at[slot])
    d_v, d_k = wgmma.accumulate(multiply, tile, tile, sums["d_v"], sums["d_k"], interpret=config.interpret)
    config.ring.release(slot, buffers.d_out_empty, buffers.q_empty)
    return {"d_k": d_k, "d_v": d_v}
