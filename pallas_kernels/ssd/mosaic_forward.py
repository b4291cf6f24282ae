"""Hopper kernel of the forward of the state space layer: a warpgroup computes one head of one sequence.

It takes one chunk of tokens after the other, and keeps the head's state in registers. So all inputs are read once, and
neither states nor scores go to global memory. Heads of a program are of one group, and share B and C. If there are few
heads, several programs compute a head, each the outputs of its own chunks (`pallas_kernels.hopper.replay`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.hopper import pipeline, replay, wgmma
from pallas_kernels.hopper.wgmma import Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu
from pallas_kernels.ssd import mosaic_parts as parts
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, Sequences, SsdPlan

_SHARE = 2 / 7
"""Products for the state of a chunk, relative to those for its state and its outputs."""


class _Buffers(NamedTuple):
    """Shared memory and barriers; leading dims are stages, then warpgroups, then (of `y`) chunks in turn.

    `full` is for what states are computed from, `seen_full` for what only outputs need.
    """

    x: Ref
    b: Ref
    c: Ref
    factors: Ref
    documents: Ref | None
    state: Ref
    ends: Ref
    y: Ref
    full: Ref
    seen_full: Ref
    empty: Ref


class _Outputs(NamedTuple):
    y: Ref
    last: Ref


class _Place(NamedTuple):
    """Part of a program: sequence, group, the first head, its first own chunk, and the one after its last."""

    batch: Index
    group: Index
    head: Index
    begin: Index
    end: Index


def forward(
    plan: SsdPlan, inputs: Sequences, state: Float[Array, "B N P S"]
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Compute the outputs [B, T, N, P] in the dtype of x, and the state after the last token, float32 [B, N, P, S].

    Args:
        plan: Block sizes; `warpgroups` divides the number of heads of a group.
        inputs: Inputs; T is a multiple of 8 and at least `CHUNK`.
        state: The state before the first token, float32.
    """
    batch, _, heads, _ = inputs.x.shape
    width = inputs.b.shape[3]
    dtype = inputs.x.dtype
    groups, stages = plan.warpgroups, plan.stages
    packed = inputs.documents is not None
    matrix = tiled_smem((stages, CHUNK, width), dtype)
    scratch = _Buffers(
        x=tiled_smem((stages, groups, CHUNK, CHANNELS), dtype),
        b=matrix,
        c=matrix,
        factors=plgpu.SMEM((stages, groups, parts.FACTORS, CHUNK), jnp.float32),
        documents=plgpu.SMEM((stages, 2, CHUNK), jnp.int32) if packed else None,
        state=tiled_smem((groups, CHANNELS, width), dtype),
        ends=tiled_smem((groups, CHUNK, CHANNELS), dtype),
        y=tiled_smem((groups, 2, CHUNK, CHANNELS), dtype),
        full=plgpu.Barrier(num_arrivals=1 + 2 * groups, num_barriers=stages),
        seen_full=plgpu.Barrier(num_arrivals=1 + packed, num_barriers=stages),
        empty=pipeline.empty_barriers(groups, stages, 1),
    )
    kernel = pipeline.launch(
        "ssd_forward",
        functools.partial(_body, plan),
        consumers=groups,
        interpret=plan.interpret,
        out_type=(
            jax.ShapeDtypeStruct(inputs.x.shape, dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ),
        grid=(heads // groups, batch, plan.programs),
        grid_names=("heads", "batch", "program"),
        scratch_types=scratch,
        compiler_params=plan.compiler_params(),
    )
    return tuple(kernel(inputs, state))


def _body(plan: SsdPlan, inputs: Sequences, state: Ref, y: Ref, last: Ref, *scratch: Ref) -> None:
    inputs = Sequences(*inputs)
    buffers = _Buffers(*scratch)
    head = lax.axis_index("heads") * plan.warpgroups
    group = lax.div(head, inputs.x.shape[2] // inputs.b.shape[2])
    chunks = inputs.factors.shape[2]
    own = replay.own_chunks(chunks, plan.programs, _SHARE, lax.axis_index("program"))
    place = _Place(lax.axis_index("batch"), group, head, *own)
    pipeline.specialize(
        lax.axis_index("warpgroup"),
        plan.warpgroups,
        functools.partial(_compute, plan, chunks, buffers, place, state, _Outputs(y, last)),
        functools.partial(_load, plan, inputs, buffers, place),
    )


def _load(plan: SsdPlan, inputs: Sequences, buffers: _Buffers, place: _Place) -> None:
    """Load one chunk after the other into shared memory, as the loading warpgroup."""

    def load_seen(index: Index, slot: Index) -> None:
        full = buffers.seen_full.at[slot]
        part = place.batch, pl.ds(parts.tokens_of(index), CHUNK)
        plgpu.copy_gmem_to_smem(inputs.c.at[*part, place.group], buffers.c.at[slot], full)
        if inputs.documents is not None and buffers.documents is not None:
            plgpu.copy_gmem_to_smem(inputs.documents.at[place.batch, index], buffers.documents.at[slot], full)

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        if plan.programs == 1:
            load_seen(index, slot)
        else:
            pl.when(index >= place.begin)(lambda: load_seen(index, slot))
        full = buffers.full.at[slot]
        part = place.batch, pl.ds(parts.tokens_of(index), CHUNK)
        plgpu.copy_gmem_to_smem(inputs.b.at[*part, place.group], buffers.b.at[slot], full)
        for number in range(plan.warpgroups):
            head = place.head + number
            factors = inputs.factors.at[place.batch, head, index]
            plgpu.copy_gmem_to_smem(factors, buffers.factors.at[slot, number], full)
            plgpu.copy_gmem_to_smem(inputs.x.at[*part, head], buffers.x.at[slot, number], full)

    plan.ring.produce(0, place.end, load)
    plan.ring.drain(place.end, buffers.empty)


def _compute(plan: SsdPlan, chunks: int, buffers: _Buffers, place: _Place, first: Ref, outputs: _Outputs) -> None:
    """Compute and store the outputs of one head, and its last state, as one computing warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    head = place.head + warpgroup

    def repeat(index: Index, state: jax.Array) -> jax.Array:
        slot = plan.ring.slot(index)
        plgpu.barrier_wait(buffers.full.at[slot])
        state = _advance_state(plan, buffers, slot, state)
        plan.ring.release(slot, buffers.empty)
        return state

    def step(index: Index, state: jax.Array) -> jax.Array:
        slot = plan.ring.slot(index)
        # The state is written before the chunk is waited for.
        rounded = buffers.state.at[warpgroup]
        rounded[...] = state.astype(rounded.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(buffers.full.at[slot])
        plgpu.barrier_wait(buffers.seen_full.at[slot])
        y, state = _advance(plan, buffers, slot, state)
        plan.ring.release(slot, buffers.empty)
        staging = buffers.y.at[warpgroup, lax.rem(index, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staging[...] = y.astype(staging.dtype)
        plgpu.commit_smem()
        rows = pl.ds(parts.tokens_of(index), CHUNK)
        plgpu.copy_smem_to_gmem(staging, outputs.y.at[place.batch, rows, head])
        return state

    state = plgpu.load(first.at[place.batch, head], layout=plgpu.Layout.WGMMA, optimized=False)
    if plan.programs > 1:
        state = lax.fori_loop(0, place.begin, repeat, state)
    state = lax.fori_loop(place.begin, place.end, step, state)

    @pl.when(place.end == chunks)
    def _():
        outputs.last[place.batch, head] = state

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _advance_state(plan: SsdPlan, buffers: _Buffers, slot: Index, state: jax.Array) -> jax.Array:
    """Return the state after a chunk of one head, float32 [P, S], without the outputs."""
    warpgroup = lax.axis_index("warpgroup")
    factors, ends = buffers.factors.at[slot, warpgroup], buffers.ends.at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # A barrier: the last product has read `ends`.
    ends[...] = parts.scaled_rows(buffers.x.at[slot, warpgroup], factors, parts.ENDS).astype(ends.dtype)
    plgpu.commit_smem()
    kept = state * parts.row_factor(factors, parts.KEEP, state)
    added: tuple[Any, Ref] = (lambda: ends.transpose((1, 0))), buffers.b.at[slot]
    (state,) = wgmma.add_products((kept,), added, interpret=plan.interpret)
    return state


def _advance(plan: SsdPlan, buffers: _Buffers, slot: Index, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of a chunk of one head, float32 [C, P], and the state after it, float32 [P, S]."""
    warpgroup = lax.axis_index("warpgroup")
    x, factors, ends = buffers.x.at[slot, warpgroup], buffers.factors.at[slot, warpgroup], buffers.ends.at[warpgroup]
    b, c, rounded = buffers.b.at[slot], buffers.c.at[slot], buffers.state.at[warpgroup]
    documents = None if buffers.documents is None else buffers.documents.at[slot]

    def start(scores: Accumulator, seen: Accumulator) -> None:
        scores.add(c, b.transpose((1, 0)))
        seen.add(c, rounded.transpose((1, 0)))
        ends[...] = parts.scaled_rows(x, factors, parts.ENDS).astype(ends.dtype)
        plgpu.commit_smem()

    def weigh(scores: jax.Array) -> jax.Array:
        return scores * parts.decays(factors, documents, scores) * parts.column_factor(factors, parts.STEP, scores)

    weights, seen = wgmma.multiply_two((CHUNK, CHUNK), start, weigh)
    y = seen * parts.row_factor(factors, parts.SEEN, seen)
    kept = state * parts.row_factor(factors, parts.KEEP, state)
    within: tuple[Any, Ref] = (lambda: weights.astype(x.dtype)), x
    added: tuple[Any, Ref] = (lambda: ends.transpose((1, 0))), b
    y, state = wgmma.add_products((y, kept), within, added, interpret=plan.interpret)
    return y, state
