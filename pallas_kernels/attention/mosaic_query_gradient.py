"""The kernel of the attention backward for Hopper that computes dQ alone.

A warpgroup owns 64 queries and visits their keys.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import mosaic_scores as scoring
from pallas_kernels.attention.mosaic_config import KernelConfig, read_visits
from pallas_kernels.attention.mosaic_residuals import Inputs, Place, Residuals, Weighed
from pallas_kernels.attention.request import Segments
from pallas_kernels.attention.visible_tiles import key_runs
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu


class _QueryBuffers(NamedTuple):
    """Shared memory and barriers of the dQ kernel.

    The leading dim counts warpgroups for queries, stages for keys.
    """

    q: Ref
    d_out: Ref
    lse: Ref
    delta: Ref
    k: Ref
    v: Ref
    query_ids: Ref | None
    key_ids: Ref | None
    own_full: Ref
    k_full: Ref
    v_full: Ref
    k_empty: Ref
    v_empty: Ref


def query_gradient(
    config: KernelConfig, residuals: Residuals, schedule: tuple[jax.Array, ...], segments: Segments | None
) -> Float[Array, "B T N H"]:
    """Compute only the gradient dQ [B, T, N, H] of attention, in a separate kernel.

    `schedule` lists the key blocks of each query block (`tiles.key_schedule`).
    """
    batch, length, num_heads, head_dim = residuals.q.shape
    dtype = residuals.q.dtype
    groups = config.warpgroups
    stages = config.stages
    packed = segments is not None
    key_tile = config.tiled_smem((stages, config.key_block, head_dim), dtype)
    own_tile = config.tiled_smem((groups, ROWS, head_dim), dtype)
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
        functools.partial(_query_body, config),
        out_type=jax.ShapeDtypeStruct(residuals.q.shape, dtype),
        grid=(num_heads, pl.cdiv(length, config.query_block), batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
    )
    return kernel(residuals, schedule, segments)


def _query_body(
    config: KernelConfig, inputs: Inputs, schedule: tuple[Ref, ...], ids: Segments | None, d_q: Ref, *scratch: Ref
) -> None:
    inputs = Inputs(*inputs)
    buffers = _QueryBuffers(*scratch)
    warpgroup, batch, head = (lax.axis_index(name) for name in ("warpgroup", "batch", "head"))
    block = lax.axis_size("block") - 1 - lax.axis_index("block")
    runs = key_runs(config.options.mask, config.blocks, ids is not None)
    place = Place(batch, head, block * config.query_block, read_visits(schedule, batch, block, runs))
    pipeline.specialize(
        warpgroup,
        config.warpgroups,
        functools.partial(_query_compute, config, inputs, ids, buffers, place, d_q),
        functools.partial(_query_load, config, inputs, ids, buffers, place),
    )


def _query_load(
    config: KernelConfig, inputs: Inputs, ids: Segments | None, buffers: _QueryBuffers, place: Place
) -> None:
    """Load the visible blocks of keys and values into shared memory, as the loading warpgroup of the dQ kernel."""
    kv_head = lax.div(place.head, inputs.q.shape[2] // inputs.k.shape[2])

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        part = place.batch, pl.ds(place.visits.tile(index) * config.key_block, config.key_block), kv_head
        acquire(buffers.k_empty, buffers.v_empty)
        plgpu.copy_gmem_to_smem(inputs.k.at[part], buffers.k.at[slot], buffers.k_full.at[slot])
        if ids is not None and buffers.key_ids is not None:
            plgpu.copy_gmem_to_smem(ids.key.at[part[:2]], buffers.key_ids.at[slot], buffers.k_full.at[slot])
        plgpu.copy_gmem_to_smem(inputs.v.at[part], buffers.v.at[slot], buffers.v_full.at[slot])

    config.ring.produce(0, place.visits.total, load)
    config.ring.drain(place.visits.total, buffers.k_empty, buffers.v_empty)


def _query_compute(
    config: KernelConfig, inputs: Inputs, ids: Segments | None, buffers: _QueryBuffers, place: Place, d_q: Ref
) -> None:
    """Compute and store dQ of 64 queries, as one computing warpgroup of the dQ kernel."""
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
    if ids is not None and buffers.query_ids is not None:
        plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[warpgroup], full)
    plgpu.barrier_wait(full)
    lse = wgmma.load_rows(buffers.lse.at[warpgroup])
    delta = wgmma.load_rows(buffers.delta.at[warpgroup])
    query_ids = None if buffers.query_ids is None else wgmma.load_rows(buffers.query_ids.at[warpgroup])
    q = buffers.q.at[warpgroup]
    d_out = buffers.d_out.at[warpgroup]
    shape = (ROWS, config.key_block)

    def step(masked: bool, count: Index, acc: jax.Array) -> jax.Array:
        slot = config.ring.slot(count)
        tile = place.visits.tile(count)
        k = buffers.k.at[slot]
        v = buffers.v.at[slot]

        def start(scores: Accumulator, d_weights: Accumulator) -> None:
            plgpu.barrier_wait(buffers.k_full.at[slot])
            scores.add(q, k.transpose((1, 0)))
            plgpu.barrier_wait(buffers.v_full.at[slot])
            d_weights.add(d_out, v.transpose((1, 0)))

        def weigh(products: jax.Array) -> Weighed:
            capped = scoring.cap(config, products)
            weights = jnp.exp2(capped * scoring.base2_factor(config) - wgmma.broadcast_row_values(lse, capped))
            capped = None if config.options.soft_cap is None else capped
            if not masked:
                return weights, capped
            pair = None
            if query_ids is not None and buffers.key_ids is not None:
                key_ids = wgmma.load_columns(buffers.key_ids.at[slot])
                pair = wgmma.broadcast_row_values(query_ids, weights), wgmma.broadcast_column_values(key_ids, weights)
            return scoring.mask_tile(config, weights, 0.0, first_query, tile * config.key_block, pair), capped

        (weights, capped), d_weights = wgmma.multiply_two(shape, start, weigh)
        config.ring.release(slot, buffers.v_empty)
        gradient = scoring.score_gradient(weights, d_weights, wgmma.broadcast_row_values(delta, weights), capped)
        operands = (lambda: gradient.astype(d_q.dtype)), k
        (acc,) = wgmma.add_products((acc,), operands, interpret=config.interpret)
        config.ring.release(slot, buffers.k_empty)
        return acc

    acc = place.visits.fold(step, wgmma.zeros(ROWS, q.shape[-1]))
    q[...] = (acc * config.options.scale).astype(d_q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, d_q.at[place.batch, rows, place.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
