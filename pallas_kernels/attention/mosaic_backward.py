"""The backward of attention for Hopper: one kernel for dQ, one for dK and dV, both skipping what the mask hides.

Scores are computed again from q, k and the log-sum-exp. In the dQ kernel a warpgroup owns 64 queries and visits
their keys; in the other it owns 64 keys and visits the queries of every head of the group that see them, so that
grouped heads need no further sum. All sums stay in registers and the results do not depend on timing.
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
    limits: list


def _limits(ranges: Any, batch: Any, block: Any) -> list:
    row = batch if ranges.shape[0] > 1 else 0
    return [ranges[row, block, index] for index in range(4)]


def _visit(limits: list, step: Any, state: Any) -> Any:
    """Folds step(masked, tile, state) over the tiles of the limits."""
    first, first_whole, end_whole, end = limits
    state = lax.fori_loop(first, first_whole, functools.partial(step, True), state)
    state = lax.fori_loop(first_whole, end_whole, functools.partial(step, False), state)
    return lax.fori_loop(end_whole, end, functools.partial(step, True), state)


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


def query_gradient(config: Config, residuals: Residuals, ranges: jax.Array, segments: Segments | None) -> jax.Array:
    """dQ [B, T, N, H]; `ranges` are those of `tiles.key_ranges`."""
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
        functools.partial(_query_body, config, packed),
        out_type=jax.ShapeDtypeStruct(residuals.q.shape, dtype),
        grid=(num_heads, length // config.query_block, batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
    )
    return kernel(residuals, ranges, segments)


def _query_body(
    config: Config, packed: bool, inputs: Residuals, ranges: Any, ids: Any, d_q: Any, *scratch: Any
) -> None:
    buffers = _QueryBuffers(*scratch)
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    block = inputs.q.shape[1] // config.query_block - 1 - lax.axis_index("block")
    place = _Place(batch, head, block * config.query_block, _limits(ranges, batch, block))

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
    first, end = place.limits[0], place.limits[3]

    def step(tile: jax.Array, _: None) -> None:
        slot = lax.rem(tile - first, config.stages)
        part = place.batch, pl.ds(tile * config.key_block, config.key_block), kv_head

        @pl.when(tile - first >= config.stages)
        def _():
            plgpu.barrier_wait(buffers.k_empty.at[slot])
            plgpu.barrier_wait(buffers.v_empty.at[slot])

        plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[slot], buffers.k_full.at[slot])
        if buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(ids.key.at[part[:2]], buffers.key_ids.at[slot], buffers.k_full.at[slot])
        plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[slot], buffers.v_full.at[slot])

    lax.fori_loop(first, end, step, None)
    pieces.drain(config, end - first, (buffers.k_empty, buffers.v_empty))


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

    def step(masked: bool, tile: jax.Array, acc: jax.Array) -> jax.Array:
        slot = lax.rem(tile - place.limits[0], config.stages)
        k, v = buffers.k.at[slot], buffers.v.at[slot]

        def issue(scores: Any, d_weights: Any) -> None:
            plgpu.barrier_wait(buffers.k_full.at[slot])
            plgpu.wgmma(scores, q, k.transpose((1, 0)))
            plgpu.barrier_wait(buffers.v_full.at[slot])
            plgpu.wgmma(d_weights, d_out, v.transpose((1, 0)))

        def weigh(products: jax.Array) -> tuple[jax.Array, jax.Array]:
            capped = pieces.cap(config, products)
            weights = jnp.exp2(capped * config.factor - pieces.along_rows(lse, capped))
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

    acc = _visit(place.limits, step, pieces.zeros(ROWS, q.shape[-1]))
    q[...] = (acc * config.options.scale).astype(d_q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, d_q.at[place.batch, rows, place.head])
    plgpu.wait_smem_to_gmem(0)


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
    q_empty: Any
    d_out_empty: Any


def key_value_gradient(
    config: Config,
    residuals: Residuals,
    ranges: jax.Array,
    segments: Segments | None,
    wanted: tuple[str, ...] = ("d_k", "d_v"),
) -> tuple[jax.Array, ...]:
    """The `wanted` of dK and dV, [B, S, K, H] each; `ranges` are those of `tiles.query_ranges`.

    One accumulator at a time is what the registers have room for at large head dims.
    """
    batch, key_length, num_kv_heads, head_dim = residuals.k.shape
    dtype, groups, stages = residuals.k.dtype, config.warpgroups, config.stages
    packed = segments is not None
    query_tile = pieces.tiled_smem(config, (stages, config.query_block, head_dim), dtype)
    query_row = plgpu.SMEM((stages, config.query_block), jnp.float32)
    own_tile = pieces.tiled_smem(config, (groups, ROWS, head_dim), dtype)
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
        d_out_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        q_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        d_out_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )
    like_k = jax.ShapeDtypeStruct(residuals.k.shape, dtype)
    kernel = config.kernel(
        functools.partial(_key_body, config, wanted),
        out_type=(like_k,) * len(wanted),
        grid=(num_kv_heads, key_length // config.key_block, batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
    )
    return kernel(residuals, ranges, segments)


def _key_body(config: Config, wanted: tuple[str, ...], inputs: Residuals, ranges: Any, ids: Any, *refs: Any) -> None:
    outputs = dict(zip(wanted, refs[: len(wanted)], strict=True))
    scratch = refs[len(wanted) :]
    buffers = _KeyBuffers(*scratch)
    warpgroup, batch, head, block = (lax.axis_index(name) for name in ("warpgroup", "batch", "head", "block"))
    # The first blocks of keys are seen by most queries under a causal mask: they start first.
    place = _Place(batch, head, block * config.key_block, _limits(ranges, batch, block))

    @pl.when(warpgroup < config.warpgroups)
    def _():
        config.share_registers(computing=True)
        _key_compute(config, inputs, ids, buffers, place, outputs)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        config.share_registers(computing=False)
        _key_load(config, inputs, ids, buffers, place)


def _key_load(config: Config, inputs: Residuals, ids: Any, buffers: _KeyBuffers, place: _Place) -> None:
    group = inputs.q.shape[2] // inputs.k.shape[2]
    first, end = place.limits[0], place.limits[3]

    def of_head(member: jax.Array, _: None) -> None:
        head = place.head * group + member

        def step(tile: jax.Array, _: None) -> None:
            count = member * (end - first) + tile - first
            slot = lax.rem(count, config.stages)
            rows = pl.ds(tile * config.query_block, config.query_block)

            @pl.when(count >= config.stages)
            def _():
                plgpu.barrier_wait(buffers.q_empty.at[slot])
                plgpu.barrier_wait(buffers.d_out_empty.at[slot])

            full = buffers.q_full.at[slot]
            plgpu.copy_gmem_to_smem(inputs.q.at[place.batch, rows, head], buffers.q.at[slot], full)
            plgpu.copy_gmem_to_smem(inputs.lse.at[place.batch, head, rows], buffers.lse.at[slot], full)
            if buffers.query_ids is not None:
                plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[slot], full)
            full = buffers.d_out_full.at[slot]
            plgpu.copy_gmem_to_smem(inputs.d_out.at[place.batch, rows, head], buffers.d_out.at[slot], full)
            plgpu.copy_gmem_to_smem(inputs.delta.at[place.batch, head, rows], buffers.delta.at[slot], full)

        lax.fori_loop(first, end, step, None)

    lax.fori_loop(0, group, of_head, None)
    pieces.drain(config, group * (end - first), (buffers.q_empty, buffers.d_out_empty))


def _key_compute(
    config: Config, inputs: Residuals, ids: Any, buffers: _KeyBuffers, place: _Place, outputs: dict
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
    first, end = place.limits[0], place.limits[3]
    head_dim = inputs.k.shape[3]

    def of_head(member: jax.Array, state: dict) -> dict:
        def step(masked: bool, tile: jax.Array, state: dict) -> dict:
            slot = lax.rem(member * (end - first) + tile - first, config.stages)
            return _key_tile(config, buffers, state, slot, masked, (tile, first_key, key_ids))

        return _visit(place.limits, step, state)

    group = inputs.q.shape[2] // inputs.k.shape[2]
    state = lax.fori_loop(0, group, of_head, {name: pieces.zeros(ROWS, head_dim) for name in outputs})
    factors = {"d_k": config.options.scale, "d_v": 1.0}
    staging = {"d_k": buffers.k.at[warpgroup], "d_v": buffers.v.at[warpgroup]}
    for name, ref in outputs.items():
        staging[name][...] = (state[name] * factors[name]).astype(ref.dtype)
    plgpu.commit_smem()
    for name, ref in outputs.items():
        plgpu.copy_smem_to_gmem(staging[name], ref.at[part])
    plgpu.wait_smem_to_gmem(0)


def _key_tile(config: Config, buffers: _KeyBuffers, state: dict, slot: jax.Array, masked: bool, tile: tuple) -> dict:
    """Adds one block of queries, scores and their gradient transposed: [keys, queries]."""
    index, first_key, key_ids = tile
    warpgroup = lax.axis_index("warpgroup")
    k, v, q, d_out = buffers.k.at[warpgroup], buffers.v.at[warpgroup], buffers.q.at[slot], buffers.d_out.at[slot]
    shape = (ROWS, config.query_block)

    def of_columns(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))

    def issue(scores: Any, d_weights: Any) -> None:
        plgpu.barrier_wait(buffers.q_full.at[slot])
        plgpu.wgmma(scores, k, q.transpose((1, 0)))
        plgpu.barrier_wait(buffers.d_out_full.at[slot])
        if d_weights is not None:
            plgpu.wgmma(d_weights, v, d_out.transpose((1, 0)))

    def weigh(products: jax.Array) -> tuple[jax.Array, jax.Array]:
        capped = pieces.cap(config, products)
        lse = pieces.along_columns(of_columns(buffers.lse), capped)
        weights = jnp.exp2(capped * config.factor - lse)
        if not masked:
            return weights, capped
        pair = None
        if key_ids is not None:
            query_ids = of_columns(buffers.query_ids)
            pair = pieces.along_columns(query_ids, weights), pieces.along_rows(key_ids, weights)
        first_query = index * config.query_block
        return pieces.mask_tile(config, weights, 0.0, first_query, first_key, pair, keys_are_rows=True), capped

    names = tuple(state)
    if "d_k" in state:
        (weights, capped), d_weights = pieces.multiply_two(shape, issue, weigh)
        delta = pieces.along_columns(of_columns(buffers.delta), weights)
    else:
        weights, _ = weigh(pieces.multiply(shape, lambda scores: issue(scores, None)))
    products = {"d_v": (lambda: weights.astype(v.dtype), d_out)}
    if "d_k" in state:
        products["d_k"] = (
            lambda: pieces.weight_gradient(config, weights, d_weights, delta, capped).astype(k.dtype),
            q,
        )
    order = [name for name in ("d_v", "d_k") if name in state]
    sums = pieces.add_products(config, tuple(state[name] for name in order), *(products[name] for name in order))
    pieces.release(config, buffers.d_out_empty.at[slot])
    pieces.release(config, buffers.q_empty.at[slot])
    state = dict(zip(order, sums, strict=True))
    return {name: state[name] for name in names}
