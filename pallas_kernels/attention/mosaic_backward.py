"""The backward of attention for Hopper, in one kernel or in two; all skip the tiles that the mask hides.

Scores are computed again from q, k and the log-sum-exp. In the kernel for dK and dV a warpgroup owns 64 keys and
visits the queries of every head of the group that see them, so that grouped heads need no further sum.

Fused, the same kernel adds its part of dQ to a float32 array in global memory, five products for each tile instead
of seven: the two warpgroups exchange the gradients of their scores through shared memory, and each computes half of
the tile's dQ for all 128 keys (as FlashAttention-3 does, Shah et al., arXiv:2407.08608). The order of these sums
depends on timing, so the last bit of dQ may differ from run to run. In two kernels, the other one computes dQ: a
warpgroup owns 64 queries and visits their keys; all sums stay in registers and every bit is the same in each run.
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

# The log-sum-exp of a query without a visible key: every weight becomes exp2(score - 1e30) = 0.
NO_KEY = 1e30
# Tiles whose scores' gradients stay in shared memory: this one's, the one before, which the other warpgroup may read,
# and that warpgroup's next.
_EXCHANGES = 3


class Residuals(NamedTuple):
    """What both kernels read; lengths are padded to whole blocks."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    d_out: jax.Array  # [B, T, N, H]
    lse: jax.Array  # [B, N, T] as a power of two; NO_KEY for queries without a visible key
    delta: jax.Array  # [B, N, T], row sums of out * d_out less the gradient of the log-sum-exp


class _Place(NamedTuple):
    """Which part of the arrays a program owns, and the blocks of the other side that it visits."""

    batch: Any
    head: Any
    first: Any
    visits: pieces.Visits


# --- dQ ---------------------------------------------------------------------------------------------------------


class _QueryBuffers(NamedTuple):
    q: Any
    d_out: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    query_ids: Any
    key_ids: Any
    own_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any


def query_gradient(config: Config, residuals: Residuals, schedule: tuple, segments: Segments | None) -> jax.Array:
    """dQ [B, T, N, H]; `schedule` is that of `tiles.key_schedule`."""
    batch, length, num_heads, head_dim = residuals.q.shape
    dtype, groups, stages = residuals.q.dtype, config.warpgroups, config.stages
    packed = segments is not None
    key_tile = pieces.tiled_smem(config, (stages, config.key_block, head_dim), dtype)
    own_tile = pieces.tiled_smem(config, (groups, ROWS, head_dim), dtype)
    own_row = plgpu.SMEM((groups, ROWS), jnp.float32)
    scratch = _QueryBuffers(
        q=own_tile,
        d_out=own_tile,
        lse=own_row,
        delta=own_row,
        k=key_tile,
        v=key_tile,
        query_ids=plgpu.SMEM((groups, ROWS), jnp.int32) if packed else None,
        key_ids=plgpu.SMEM((stages, config.key_block), jnp.int32) if packed else None,
        own_full=plgpu.Barrier(num_arrivals=5 if packed else 4, num_barriers=groups),
        k_full=plgpu.Barrier(num_arrivals=2 if packed else 1, num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        k_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )
    kernel = config.kernel(
        "attention_d_q",
        functools.partial(_query_body, config, packed),
        out_type=jax.ShapeDtypeStruct(residuals.q.shape, dtype),
        grid=(num_heads, length // config.query_block, batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
    )
    return kernel(residuals, schedule, segments)


def _query_body(
    config: Config, packed: bool, inputs: Residuals, schedule: Any, ids: Any, d_q: Any, *scratch: Any
) -> None:
    buffers = _QueryBuffers(*scratch)
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    block = inputs.q.shape[1] // config.query_block - 1 - lax.axis_index("block")
    place = _Place(batch, head, block * config.query_block, pieces.read_visits(schedule, batch, block))

    @pl.when(warpgroup < config.warpgroups)
    def _():
        config.share_registers(computing=True)
        _query_compute(config, inputs, ids, buffers, place, d_q)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        config.share_registers(computing=False)
        _query_load(config, inputs, ids, buffers, place)


def _query_load(config: Config, inputs: Residuals, ids: Any, buffers: _QueryBuffers, place: _Place) -> None:
    kv_head = lax.div(place.head, inputs.q.shape[2] // inputs.k.shape[2])

    def step(count: jax.Array, _: None) -> None:
        slot = lax.rem(count, config.stages)
        part = place.batch, pl.ds(place.visits.tile(count) * config.key_block, config.key_block), kv_head

        @pl.when(count >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.k_empty.at[slot])
            plgpu.barrier_wait(buffers.v_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[slot], buffers.k_full.at[slot])
        if buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(ids.key.at[part[:2]], buffers.key_ids.at[slot], buffers.k_full.at[slot])
        plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[slot], buffers.v_full.at[slot])

    lax.fori_loop(0, place.visits.count, step, None)
    pieces.drain(config.stages, place.visits.count, buffers.k_empty, buffers.v_empty)


def _query_compute(
    config: Config, inputs: Residuals, ids: Any, buffers: _QueryBuffers, place: _Place, d_q: Any
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    first_query = place.first + warpgroup * ROWS
    rows = pl.ds(first_query, ROWS)
    full = buffers.own_full.at[warpgroup]
    part = place.batch, rows, place.head
    plgpu.copy_gmem_to_smem(inputs.q.at[part], buffers.q.at[warpgroup], full)
    plgpu.copy_gmem_to_smem(inputs.d_out.at[part], buffers.d_out.at[warpgroup], full)
    part = place.batch, place.head, rows
    plgpu.copy_gmem_to_smem(inputs.lse.at[part], buffers.lse.at[warpgroup], full)
    plgpu.copy_gmem_to_smem(inputs.delta.at[part], buffers.delta.at[warpgroup], full)
    if buffers.query_ids is not None:
        plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[warpgroup], full)
    plgpu.barrier_wait(full)

    def of_rows(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))

    lse, delta = of_rows(buffers.lse), of_rows(buffers.delta)
    query_ids = None if buffers.query_ids is None else of_rows(buffers.query_ids)
    q, d_out = buffers.q.at[warpgroup], buffers.d_out.at[warpgroup]
    shape = (ROWS, config.key_block)

    def step(masked: bool, count: jax.Array, acc: jax.Array) -> jax.Array:
        slot, tile = lax.rem(count, config.stages), place.visits.tile(count)
        k, v = buffers.k.at[slot], buffers.v.at[slot]

        def issue(scores: Any, d_weights: Any) -> None:
            plgpu.barrier_wait(buffers.k_full.at[slot])
            plgpu.wgmma(scores, q, k.transpose((1, 0)))
            plgpu.barrier_wait(buffers.v_full.at[slot])
            plgpu.wgmma(d_weights, d_out, v.transpose((1, 0)))

        def weigh(products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            capped = pieces.cap(config, products)
            weights = jnp.exp2(capped * config.factor - pieces.along_rows(lse, capped))
            capped = None if config.options.soft_cap is None else capped
            if not masked:
                return weights, capped
            pair = None
            if query_ids is not None:
                key_ids = plgpu.load(buffers.key_ids.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
                pair = pieces.along_rows(query_ids, weights), pieces.along_columns(key_ids, weights)
            return pieces.mask_tile(config, weights, 0.0, first_query, tile * config.key_block, pair), capped

        (weights, capped), d_weights = pieces.multiply_two(shape, issue, weigh)
        pieces.release(config, buffers.v_empty.at[slot])
        gradient = pieces.weight_gradient(config, weights, d_weights, pieces.along_rows(delta, weights), capped)
        (acc,) = pieces.add_products(config, (acc,), (lambda: gradient.astype(d_q.dtype), k))
        pieces.release(config, buffers.k_empty.at[slot])
        return acc

    acc = place.visits.fold(step, pieces.zeros(ROWS, q.shape[-1]))
    q[...] = (acc * config.options.scale).astype(d_q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, d_q.at[place.batch, rows, place.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# --- dK and dV --------------------------------------------------------------------------------------------------


class _KeyBuffers(NamedTuple):
    k: Any
    v: Any
    q: Any
    d_out: Any
    lse: Any
    delta: Any
    key_ids: Any
    query_ids: Any
    own_full: Any
    q_full: Any
    d_out_full: Any
    delta_full: Any
    q_empty: Any
    d_out_empty: Any
    # Of the fused kernel: gradients of the scores for both warpgroups, some tiles deep, and a part of dQ for each.
    exchange: Any = None
    d_q: Any = None
    exchanged: Any = None


def key_value_gradient(
    config: Config,
    residuals: Residuals,
    schedule: tuple,
    segments: Segments | None,
    wanted: tuple[str, ...] = ("d_k", "d_v"),
    d_q: Any = None,
) -> tuple[jax.Array, ...]:
    """The `wanted` of dK and dV, [B, S, K, H] each; `schedule` is that of `tiles.query_schedule`.

    One accumulator at a time is what the registers have room for at large head dims. Where `d_q` is given, a
    reference to float32 [copies, B, T, N, H] (`copies_of_query_gradient`), dQ less the factor `Options.scale` is
    added to it.
    """
    batch, key_length, num_kv_heads, head_dim = residuals.k.shape
    dtype, groups, stages = residuals.k.dtype, config.warpgroups, config.stages
    packed = segments is not None
    columns = head_dim if d_q is None else _part_columns(config, head_dim)
    query_tile = pieces.tiled_smem(config, (stages, config.query_block, head_dim), dtype, columns)
    query_row = plgpu.SMEM((stages, config.query_block), jnp.float32)
    own_tile = pieces.tiled_smem(config, (groups, ROWS, head_dim), dtype, columns)
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
    )
    if d_q is not None:
        scratch = scratch._replace(
            exchange=pieces.tiled_smem(config, (_EXCHANGES, groups, ROWS, config.query_block), dtype, columns),
            d_q=pieces.tiled_smem(config, (groups, ROWS, columns), jnp.float32),
            exchanged=plgpu.Barrier(num_arrivals=groups),
        )
    like_k = jax.ShapeDtypeStruct(residuals.k.shape, dtype)
    kernel = config.kernel(
        f"attention_{'_'.join(wanted)}" if d_q is None else "attention_backward",
        functools.partial(_key_body, config, wanted),
        out_type=(like_k,) * len(wanted),
        grid=(num_kv_heads, key_length // config.key_block, batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
        synchronises=d_q is not None,
    )
    return kernel(residuals, schedule, segments, d_q)


def copies_of_query_gradient(config: Config) -> int:
    """How many arrays the fused kernel adds dQ to. Interpret mode cannot add: there each key block has its own."""
    return -(-config.key_length // config.key_block) if config.interpret else 1


def _part_columns(config: Config, head_dim: int) -> int:
    """Of the 64 rows of a tile's dQ that a warpgroup computes: all columns, or half where a tile has 64 queries."""
    return head_dim if config.query_block > ROWS else head_dim // config.warpgroups


def _key_body(
    config: Config, wanted: tuple[str, ...], inputs: Residuals, schedule: Any, ids: Any, d_q: Any, *refs: Any
) -> None:
    outputs = dict(zip(wanted, refs[: len(wanted)], strict=True))
    scratch = refs[len(wanted) :]
    buffers = _KeyBuffers(*scratch)
    warpgroup, batch, head, block = (lax.axis_index(name) for name in ("warpgroup", "batch", "head", "block"))
    # The first blocks of keys are seen by most queries under a causal mask: they start first.
    place = _Place(batch, head, block * config.key_block, pieces.read_visits(schedule, batch, block))

    @pl.when(warpgroup < config.warpgroups)
    def _():
        config.share_registers(computing=True)
        _key_compute(config, inputs, ids, buffers, place, outputs, d_q)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        config.share_registers(computing=False)
        _key_load(config, inputs, ids, buffers, place)


def _key_load(config: Config, inputs: Residuals, ids: Any, buffers: _KeyBuffers, place: _Place) -> None:
    group = inputs.q.shape[2] // inputs.k.shape[2]
    visits = place.visits

    def of_head(member: jax.Array, _: None) -> None:
        head = place.head * group + member

        def step(index: jax.Array, _: None) -> None:
            count = member * visits.count + index
            slot = lax.rem(count, config.stages)
            rows = pl.ds(visits.tile(index) * config.query_block, config.query_block)

            @pl.when(count >= config.stages)
            def _():
                plgpu.barrier_wait(buffers.q_empty.at[slot])
                plgpu.barrier_wait(buffers.d_out_empty.at[slot])

            full = buffers.q_full.at[slot]
            plgpu.copy_gmem_to_smem(inputs.q.at[place.batch, rows, head], buffers.q.at[slot], full)
            plgpu.copy_gmem_to_smem(inputs.lse.at[place.batch, head, rows], buffers.lse.at[slot], full)
            if buffers.query_ids is not None:
                plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[slot], full)
            d_out_full, delta_full = buffers.d_out_full.at[slot], buffers.delta_full.at[slot]
            plgpu.copy_gmem_to_smem(inputs.d_out.at[place.batch, rows, head], buffers.d_out.at[slot], d_out_full)
            plgpu.copy_gmem_to_smem(inputs.delta.at[place.batch, head, rows], buffers.delta.at[slot], delta_full)

        lax.fori_loop(0, visits.count, step, None)

    lax.fori_loop(0, group, of_head, None)
    pieces.drain(config.stages, group * visits.count, buffers.q_empty, buffers.d_out_empty)


def _key_compute(
    config: Config, inputs: Residuals, ids: Any, buffers: _KeyBuffers, place: _Place, outputs: dict, d_q: Any
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    first_key = place.first + warpgroup * ROWS
    keys = pl.ds(first_key, ROWS)
    full = buffers.own_full.at[warpgroup]
    part = place.batch, keys, place.head
    plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[warpgroup], full)
    plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[warpgroup], full)
    key_ids = None
    if buffers.key_ids is not None:
        plgpu.copy_gmem_to_smem(ids.key.at[place.batch, keys], buffers.key_ids.at[warpgroup], full)
    plgpu.barrier_wait(full)
    if buffers.key_ids is not None:
        key_ids = plgpu.load(buffers.key_ids.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))
    head_dim, group = inputs.k.shape[3], inputs.q.shape[2] // inputs.k.shape[2]

    def of_head(member: jax.Array, state: dict) -> dict:
        def step(masked: bool, index: jax.Array, state: dict) -> dict:
            slot = lax.rem(member * place.visits.count + index, config.stages)
            visited = _Visited(slot, place.visits.tile(index), first_key, key_ids, masked)
            return _key_tile(config, buffers, state, visited)

        return place.visits.fold(step, state)

    if d_q is None:
        state = lax.fori_loop(0, group, of_head, {name: pieces.zeros(ROWS, head_dim) for name in outputs})
    else:
        state = _visit_fused(config, buffers, place, (first_key, key_ids), group, d_q)
    factors = {"d_k": config.options.scale, "d_v": 1.0}
    staging = {"d_k": buffers.k.at[warpgroup], "d_v": buffers.v.at[warpgroup]}
    for name, ref in outputs.items():
        staging[name][...] = (state[name] * factors[name]).astype(ref.dtype)
    plgpu.commit_smem()
    for name, ref in outputs.items():
        plgpu.copy_smem_to_gmem(staging[name], ref.at[part])
    # The program may end, and the next one begin, once its shared memory has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Visited(NamedTuple):
    """One block of queries against this warpgroup's keys."""

    slot: jax.Array
    tile: jax.Array
    first_key: jax.Array
    key_ids: jax.Array | None
    masked: bool


def _issue(
    config: Config, buffers: _KeyBuffers, visited: _Visited, scores: Any, d_weights: Any, wait: bool = True
) -> None:
    """Starts the tile's scores and the gradient of its weights, transposed: [keys, queries]."""
    warpgroup, slot = lax.axis_index("warpgroup"), visited.slot
    if wait:
        plgpu.barrier_wait(buffers.q_full.at[slot])
    plgpu.wgmma(scores, buffers.k.at[warpgroup], buffers.q.at[slot].transpose((1, 0)))
    if wait:
        plgpu.barrier_wait(buffers.d_out_full.at[slot])
    if d_weights is not None:
        plgpu.wgmma(d_weights, buffers.v.at[warpgroup], buffers.d_out.at[slot].transpose((1, 0)))


def _of_columns(ref: Any, slot: jax.Array) -> jax.Array:
    return plgpu.load(ref.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))


def _weigh(
    config: Config, buffers: _KeyBuffers, visited: _Visited, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Softmax weights [keys, queries] of the raw products, and the capped scores where there is a soft cap."""
    capped = pieces.cap(config, products)
    lse = pieces.along_columns(_of_columns(buffers.lse, visited.slot), capped)
    weights = jnp.exp2(capped * config.factor - lse)
    capped = None if config.options.soft_cap is None else capped
    if not visited.masked:
        return weights, capped
    pair = None
    if visited.key_ids is not None:
        query_ids = _of_columns(buffers.query_ids, visited.slot)
        pair = pieces.along_columns(query_ids, weights), pieces.along_rows(visited.key_ids, weights)
    first_query = visited.tile * config.query_block
    return pieces.mask_tile(config, weights, 0.0, first_query, visited.first_key, pair, keys_are_rows=True), capped


def _both_gradients(config: Config, buffers: _KeyBuffers, visited: _Visited) -> tuple[jax.Array, jax.Array]:
    """Softmax weights and the gradient of the scores, float32 [keys, queries]."""

    def weigh(products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        weights = lax.optimization_barrier(_weigh(config, buffers, visited, products))
        # A barrier of its own for delta, waited for here: the compiler moves nothing past the loop of a wait, and
        # would else wait for the second product before it computes the weights.
        plgpu.barrier_wait(buffers.delta_full.at[visited.slot])
        return weights

    (weights, capped), d_weights = pieces.multiply_two(
        (ROWS, config.query_block), functools.partial(_issue, config, buffers, visited), weigh
    )
    delta = pieces.along_columns(_of_columns(buffers.delta, visited.slot), weights)
    return weights, pieces.weight_gradient(config, weights, d_weights, delta, capped)


def _key_tile(config: Config, buffers: _KeyBuffers, state: dict, visited: _Visited) -> dict:
    """Adds one block of queries to those of dK and dV that are in the state."""
    q, d_out = buffers.q.at[visited.slot], buffers.d_out.at[visited.slot]
    operands = {}
    if "d_k" in state:
        weights, gradient = _both_gradients(config, buffers, visited)
        operands["d_k"] = lambda: gradient.astype(q.dtype), q
    else:

        def issue(scores: Any) -> None:
            _issue(config, buffers, visited, scores, None)

        products = pieces.multiply((ROWS, config.query_block), issue)
        plgpu.barrier_wait(buffers.delta_full.at[visited.slot])
        weights = _weigh(config, buffers, visited, products)[0]
    if "d_v" in state:
        operands["d_v"] = lambda: weights.astype(d_out.dtype), d_out
    order = [name for name in ("d_v", "d_k") if name in state]
    sums = pieces.add_products(config, tuple(state[name] for name in order), *(operands[name] for name in order))
    pieces.release(config, buffers.d_out_empty.at[visited.slot])
    pieces.release(config, buffers.q_empty.at[visited.slot])
    updated = dict(zip(order, sums, strict=True))
    return {name: updated[name] for name in state}


# --- dQ in the same kernel --------------------------------------------------------------------------------------


class _Before(NamedTuple):
    """The tile visited last, whose part of dQ is still to be computed."""

    tile: jax.Array
    member: jax.Array


def _visit_fused(
    config: Config, buffers: _KeyBuffers, place: _Place, keys: tuple[jax.Array, Any], group: int, d_q: Any
) -> dict:
    """dK and dV of this warpgroup's keys in registers; the tiles' dQ added to `d_q` [T, N, H]."""
    (first_key, key_ids), visits = keys, place.visits
    # The tile before the first counts as exchanged.
    plgpu.barrier_arrive(buffers.exchanged)

    def of_head(member: jax.Array, state: tuple) -> tuple:
        def step(masked: bool, index: jax.Array, state: tuple) -> tuple:
            sums, before = state
            count, tile = member * visits.count + index, visits.tile(index)
            visited = _Visited(lax.rem(count, config.stages), tile, first_key, key_ids, masked)
            add = functools.partial(_add_to_queries, config, buffers, d_q, place, before, count > 0)
            return _fused_tile(config, buffers, sums, visited, count, add), _Before(tile, member)

        return visits.fold(step, state)

    zeros = pieces.zeros(ROWS, buffers.k.shape[-1])
    start = {"d_k": zeros, "d_v": zeros}, _Before(jnp.int32(0), jnp.int32(0))
    sums, before = lax.fori_loop(0, group, of_head, start)
    count = group * visits.count
    plgpu.barrier_wait(buffers.exchanged)
    product = _product_of_queries(config, buffers, count)
    _add_to_queries(config, buffers, d_q, place, before, count > 0, product)
    # The other warpgroup may still read this one's keys, which the results are about to replace.
    plgpu.barrier_arrive(buffers.exchanged)
    plgpu.barrier_wait(buffers.exchanged)
    return sums


def _part_of_queries(config: Config, head_dim: int) -> tuple[Any, Any]:
    """Rows and columns of a tile's dQ that this warpgroup computes."""
    warpgroup, columns = lax.axis_index("warpgroup"), _part_columns(config, head_dim)
    if config.query_block > ROWS:
        return pl.ds(warpgroup * ROWS, ROWS), pl.ds(0, columns)
    return pl.ds(0, ROWS), pl.ds(warpgroup * columns, columns)


def _operands_of_queries(config: Config, buffers: _KeyBuffers, count: jax.Array) -> list[tuple[Any, Any]]:
    """The products that make up dQ of the tile before the `count`-th: one for the keys of each warpgroup."""
    rows, columns = _part_of_queries(config, buffers.q.shape[-1])
    turn = lax.rem(count + _EXCHANGES - 1, _EXCHANGES)
    return [
        (buffers.exchange.at[turn, group, :, rows].transpose((1, 0)), buffers.k.at[group, :, columns])
        for group in range(config.warpgroups)
    ]


def _product_of_queries(config: Config, buffers: _KeyBuffers, count: jax.Array) -> jax.Array:
    operands = _operands_of_queries(config, buffers, count)
    if config.interpret:
        products = [jnp.dot(left[...], right[...], preferred_element_type=jnp.float32) for left, right in operands]
        return functools.reduce(jnp.add, products)

    def issue(product: Any) -> None:
        for left, right in operands:
            plgpu.wgmma(product, left, right)

    return pieces.multiply((ROWS, _part_columns(config, buffers.q.shape[-1])), issue)


def _add_to_queries(
    config: Config, buffers: _KeyBuffers, d_q: Any, place: _Place, before: _Before, some: jax.Array, product: jax.Array
) -> None:
    """Adds this warpgroup's part of the tile `before`, where there is `some`, to the array in global memory."""
    rows, columns = _part_of_queries(config, buffers.q.shape[-1])
    staging = buffers.d_q.at[lax.axis_index("warpgroup")]
    group = d_q.shape[3] // lax.axis_size("head")
    copy = lax.axis_index("block") if config.interpret else 0
    queries = pl.ds(before.tile * config.query_block + rows.start, ROWS)
    target = d_q.at[copy, place.batch, queries, place.head * group + before.member, columns]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = product
    plgpu.commit_smem()

    @pl.when(some)
    def _():
        plgpu.copy_smem_to_gmem(staging, target, reduction_op=None if config.interpret else "add")


def _fused_tile(
    config: Config, buffers: _KeyBuffers, sums: dict, visited: _Visited, count: jax.Array, add: Any
) -> dict:
    """Adds one block of queries to dK and dV, and the dQ of the block before by `add(product)`.

    One block later the other warpgroup has long exchanged its part, so that neither waits for the other.
    """
    warpgroup, slot = lax.axis_index("warpgroup"), visited.slot
    q, d_out = buffers.q.at[slot], buffers.d_out.at[slot]

    def weigh(products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return _weigh(config, buffers, visited, products)

    def differentiate(weights: tuple[jax.Array, jax.Array | None], d_weights: jax.Array) -> jax.Array:
        plgpu.barrier_wait(buffers.delta_full.at[slot])
        delta = pieces.along_columns(_of_columns(buffers.delta, slot), d_weights)
        gradient = pieces.weight_gradient(config, weights[0], d_weights, delta, weights[1]).astype(q.dtype)
        plgpu.barrier_wait(buffers.exchanged)
        buffers.exchange.at[lax.rem(count, _EXCHANGES), warpgroup][...] = gradient
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.exchanged)
        return gradient

    if config.interpret:
        weights, d_weights = pieces.multiply_two(
            (ROWS, config.query_block), functools.partial(_issue, config, buffers, visited), weigh
        )
        gradient = differentiate(weights, d_weights)
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        add(_product_of_queries(config, buffers, count))
        d_v = sums["d_v"] + dot(weights[0].astype(d_out.dtype), d_out[...])
        d_k = sums["d_k"] + dot(gradient, q[...])
    else:
        part = plgpu.ACC((ROWS, _part_columns(config, q.shape[-1])), jnp.float32)

        def scoped(scores: Any, d_weights: Any, d_v: Any, d_k: Any) -> tuple[jax.Array, jax.Array]:
            d_v[...] = sums["d_v"]
            d_k[...] = sums["d_k"]
            _issue(config, buffers, visited, scores, d_weights, wait=False)
            weights = weigh(plgpu.wgmma_accumulator_load(scores, wait_n=1))
            left = weights[0].astype(d_out.dtype)
            gradient = differentiate(weights, plgpu.wgmma_accumulator_load(d_weights, wait_n=0))
            plgpu.wgmma(d_v, left, d_out)

            def with_product(product: Any) -> None:
                for scores_of_keys, keys in _operands_of_queries(config, buffers, count):
                    plgpu.wgmma(product, scores_of_keys, keys)
                plgpu.wgmma(d_k, gradient, q)
                add(plgpu.wgmma_accumulator_load(product, wait_n=1))

            pl.run_scoped(with_product, part)
            return plgpu.wgmma_accumulator_load(d_v, wait_n=0), plgpu.wgmma_accumulator_load(d_k, wait_n=0)

        tile = plgpu.ACC((ROWS, config.query_block), jnp.float32)
        own = plgpu.ACC((ROWS, q.shape[-1]), jnp.float32)
        # Waited for here, the accumulators are zero where their first product starts, which then takes no zeros.
        plgpu.barrier_wait(buffers.q_full.at[slot])
        plgpu.barrier_wait(buffers.d_out_full.at[slot])
        d_v, d_k = pl.run_scoped(scoped, tile, tile, own, own)
    pieces.release(config, buffers.d_out_empty.at[slot])
    pieces.release(config, buffers.q_empty.at[slot])
    return {"d_k": d_k, "d_v": d_v}
