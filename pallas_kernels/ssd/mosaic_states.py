"""Hopper kernel of the states of the state space layer; of their gradients, from the last chunk to the first.

A warpgroup computes one head of one sequence: it takes one chunk after the other and keeps the state in registers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.wgmma import tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu
from pallas_kernels.ssd import mosaic_parts as parts
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, FACTORS, SsdPlan


class StateInputs(NamedTuple):
    """What the state of a head is computed from, arrays or references to them.

    Attributes:
        tokens: x, or the gradient of y, [B, T, N, P] with P = `CHANNELS`.
        matrix: b or c, [B, T, G, S].
        factors: float32 [B, N, n, FACTORS, C].
        start: the state that the recurrence starts from, float32 [B, N, P, S].
    """

    tokens: jax.Array | Ref
    matrix: jax.Array | Ref
    factors: jax.Array | Ref
    start: jax.Array | Ref


class _Buffers(NamedTuple):
    """Shared memory and barriers; the leading dims are stages, or (of `states`) chunks in turn."""

    tokens: Ref
    matrix: Ref
    factors: Ref
    scaled: Ref
    states: Ref
    full: Ref
    empty: Ref


class _Place(NamedTuple):
    """The head of a program."""

    batch: Index
    group: Index
    head: Index


def chunk_states(
    plan: SsdPlan, inputs: StateInputs, backward: bool
) -> tuple[Float[Array, "B N n P S"], Float[Array, "B N P S"]]:
    """Compute the states at the edges of all chunks.

    A chunk takes a state h to `KEEP` h + sum_j w_j z_j r_j^T, with tokens z, matrix r, and the factor w = `ENDS`, or
    `SEEN` in the backward.

    Args:
        plan: Block sizes; `warpgroups` is 1.
        inputs: Inputs; T is a multiple of 8 and at least `CHUNK`.
        backward: True to go from the last chunk to the first.

    Returns:
        The state before each chunk, in the order of the recurrence, in the dtype of the tokens: [B, N, n, P, S], which
        in the backward are the gradients of the states after each chunk; and the state after all chunks, float32.
    """
    batch, _, heads, _ = inputs.tokens.shape
    chunks = inputs.factors.shape[2]
    width = inputs.matrix.shape[3]
    dtype = inputs.tokens.dtype
    stages = plan.stages
    scratch = _Buffers(
        tokens=tiled_smem((stages, CHUNK, CHANNELS), dtype),
        matrix=tiled_smem((stages, CHUNK, width), dtype),
        factors=plgpu.SMEM((stages, FACTORS, CHUNK), jnp.float32),
        scaled=tiled_smem((CHUNK, CHANNELS), dtype),
        states=tiled_smem((2, CHANNELS, width), dtype),
        full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        empty=pipeline.empty_barriers(1, stages, 1),
    )
    kernel = pipeline.launch(
        "ssd_state_gradients" if backward else "ssd_states",
        functools.partial(_body, plan, backward),
        consumers=1,
        interpret=plan.interpret,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, chunks, CHANNELS, width), dtype),
            jax.ShapeDtypeStruct(inputs.start.shape, jnp.float32),
        ),
        grid=(heads, batch),
        grid_names=("head", "batch"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return tuple(kernel(inputs))


def _body(plan: SsdPlan, backward: bool, inputs: StateInputs, states: Ref, end: Ref, *scratch: Ref) -> None:
    inputs = StateInputs(*inputs)
    buffers = _Buffers(*scratch)
    head = lax.axis_index("head")
    group = lax.div(head, inputs.tokens.shape[2] // inputs.matrix.shape[2])
    place = _Place(lax.axis_index("batch"), group, head)
    pipeline.specialize(
        lax.axis_index("warpgroup"),
        1,
        functools.partial(_compute, plan, backward, buffers, place, inputs.start, (states, end)),
        functools.partial(_load, plan, backward, inputs, buffers, place),
    )


def _chunk(index: Index, chunks: int, backward: bool) -> Index:
    return chunks - 1 - index if backward else index


def _load(plan: SsdPlan, backward: bool, inputs: StateInputs, buffers: _Buffers, place: _Place) -> None:
    """Load one chunk after the other into shared memory, as the loading warpgroup."""
    chunks = inputs.factors.shape[2]

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        full = buffers.full.at[slot]
        chunk = _chunk(index, chunks, backward)
        part = place.batch, pl.ds(chunk * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(inputs.factors.at[place.batch, place.head, chunk], buffers.factors.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.tokens.at[*part, place.head], buffers.tokens.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.matrix.at[*part, place.group], buffers.matrix.at[slot], full)

    plan.ring.produce(0, chunks, load)
    plan.ring.drain(chunks, buffers.empty)


def _compute(
    plan: SsdPlan, backward: bool, buffers: _Buffers, place: _Place, start: Ref, outputs: tuple[Ref, Ref]
) -> None:
    """Compute and store the states of one head, as the computing warpgroup."""
    states, end = outputs
    chunks = states.shape[2]
    kind = parts.SEEN if backward else parts.ENDS
    scaled = buffers.scaled

    def step(index: Index, state: jax.Array) -> jax.Array:
        slot = plan.ring.slot(index)
        staging = buffers.states.at[lax.rem(index, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staging[...] = state.astype(staging.dtype)
        plgpu.commit_smem()
        target = states.at[place.batch, place.head, _chunk(index, chunks, backward)]
        plgpu.copy_smem_to_gmem(staging, target)
        plgpu.barrier_wait(buffers.full.at[slot])
        factors = buffers.factors.at[slot]
        scaled[...] = parts.scaled_rows(buffers.tokens.at[slot], factors, kind).astype(scaled.dtype)
        plgpu.commit_smem()
        kept = state * parts.row_factor(factors, parts.KEEP, state)
        added: tuple[Any, Ref] = (lambda: scaled.transpose((1, 0))), buffers.matrix.at[slot]
        (state,) = wgmma.add_products((kept,), added, interpret=plan.interpret)
        plan.ring.release(slot, buffers.empty)
        return state

    first = plgpu.load(start.at[place.batch, place.head], layout=plgpu.Layout.WGMMA, optimized=False)
    end[place.batch, place.head] = lax.fori_loop(0, chunks, step, first)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
