"""Hopper kernel of the states before all chunks of the state space layer, and the gradients of those after all chunks.

Both are recurrences of the same form, of which the second goes from the last chunk to the first. A warpgroup computes
one of them for one head of one sequence: it takes one chunk after the other and keeps the state in registers.
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
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, FACTORS, Operand, Sequences, SsdPlan


class StateInputs(NamedTuple):
    """Inputs of the kernel.

    Attributes:
        sequences: Inputs of the forward.
        d_y: gradient of y, [B, T, N, P].
        state: the state before the first token, float32 [B, N, P, S].
        d_last: gradient of the state after the last token, float32 [B, N, P, S].
    """

    sequences: Sequences
    d_y: Operand
    state: Operand
    d_last: Operand


class _Buffers(NamedTuple):
    """Shared memory and barriers; the leading dims are stages, or (of `states`) chunks in turn."""

    tokens: Ref
    matrix: Ref
    factors: Ref
    scaled: Ref
    states: Ref
    full: Ref
    empty: Ref


class _Recurrence(NamedTuple):
    """A recurrence for one head: z <- `KEEP` z + sum_j w_j t_j r_j^T in each chunk, from z = start.

    Attributes:
        tokens: t, [T, P].
        matrix: r, [T, S].
        kind: The factor w.
        start: float32 [P, S].
        states: z before each chunk, in the order of the recurrence, [n, P, S].
        end: z after all chunks, float32 [P, S], if it is wanted.
        chunk: Returns the number of the chunk at a step.
    """

    tokens: Ref
    matrix: Ref
    kind: int
    start: Ref
    states: Ref
    end: Ref | None
    chunk: Callable[[Index], Index]


def chunk_states(
    plan: SsdPlan, inputs: StateInputs
) -> tuple[Float[Array, "B N n P S"], Float[Array, "B N n P S"], Float[Array, "B N P S"]]:
    """Compute the states at the edges of all chunks, and their gradients.

    Args:
        plan: Block sizes; `warpgroups` is 1.
        inputs: Inputs; T is a multiple of 8 and at least `CHUNK`.

    Returns:
        The state before each chunk, and the gradient of the state after each chunk, in the dtype of x [B, N, n, P, S];
        and the gradient of the state before the first token, float32 [B, N, P, S].
    """
    x, b, _, factors, _ = inputs.sequences
    batch, _, heads, _ = x.shape
    width, stages, dtype = b.shape[3], plan.stages, x.dtype
    scratch = _Buffers(
        tokens=tiled_smem((stages, CHUNK, CHANNELS), dtype),
        matrix=tiled_smem((stages, CHUNK, width), dtype),
        factors=plgpu.SMEM((stages, FACTORS, CHUNK), jnp.float32),
        scaled=tiled_smem((CHUNK, CHANNELS), dtype),
        states=tiled_smem((2, CHANNELS, width), dtype),
        full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        empty=pipeline.empty_barriers(1, stages, 1),
    )
    states = jax.ShapeDtypeStruct((batch, heads, factors.shape[2], CHANNELS, width), dtype)
    kernel = pipeline.launch(
        "ssd_states",
        functools.partial(_body, plan),
        consumers=1,
        interpret=plan.interpret,
        out_type=(states, states, jax.ShapeDtypeStruct(inputs.state.shape, jnp.float32)),
        grid=(heads, batch, 2),
        grid_names=("head", "batch", "direction"),
        scratch_types=scratch,
        compiler_params=plan.compiler_params(),
    )
    return tuple(kernel(inputs))


def _body(plan: SsdPlan, inputs: StateInputs, states: Ref, d_states: Ref, d_state: Ref, *scratch: Ref) -> None:
    inputs = StateInputs(*inputs)
    x, b, c, factors, _ = Sequences(*inputs.sequences)
    buffers = _Buffers(*scratch)
    batch, head, direction = (lax.axis_index(name) for name in ("batch", "head", "direction"))
    group = lax.div(head, x.shape[2] // b.shape[2])
    chunks = factors.shape[2]
    tokens, matrix, own = (batch, slice(None), head), (batch, slice(None), group), (batch, head)
    forward = _Recurrence(
        x.at[tokens], b.at[matrix], parts.ENDS, inputs.state.at[own], states.at[own], None, lambda index: index
    )
    backward = _Recurrence(
        inputs.d_y.at[tokens],
        c.at[matrix],
        parts.SEEN,
        inputs.d_last.at[own],
        d_states.at[own],
        d_state.at[own],
        lambda index: chunks - 1 - index,
    )

    def run(work: Callable[[_Recurrence], None]) -> None:
        pl.when(direction == 0)(functools.partial(work, forward))
        pl.when(direction == 1)(functools.partial(work, backward))

    pipeline.specialize(
        lax.axis_index("warpgroup"),
        1,
        functools.partial(run, functools.partial(_compute, plan, buffers, chunks)),
        functools.partial(run, functools.partial(_load, plan, buffers, factors.at[own])),
    )


def _load(plan: SsdPlan, buffers: _Buffers, factors: Ref, recurrence: _Recurrence) -> None:
    """Load one chunk after the other into shared memory, as the loading warpgroup."""
    chunks = factors.shape[0]

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        full = buffers.full.at[slot]
        chunk = recurrence.chunk(index)
        rows = pl.ds(chunk * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(factors.at[chunk], buffers.factors.at[slot], full)
        plgpu.copy_gmem_to_smem(recurrence.tokens.at[rows], buffers.tokens.at[slot], full)
        plgpu.copy_gmem_to_smem(recurrence.matrix.at[rows], buffers.matrix.at[slot], full)

    plan.ring.produce(0, chunks, load)
    plan.ring.drain(chunks, buffers.empty)


def _compute(plan: SsdPlan, buffers: _Buffers, chunks: int, recurrence: _Recurrence) -> None:
    """Compute and store the states of one head, as the computing warpgroup."""
    scaled = buffers.scaled

    def step(index: Index, state: jax.Array) -> jax.Array:
        slot = plan.ring.slot(index)
        staging = buffers.states.at[lax.rem(index, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staging[...] = state.astype(staging.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, recurrence.states.at[recurrence.chunk(index)])
        plgpu.barrier_wait(buffers.full.at[slot])
        factors = buffers.factors.at[slot]
        scaled[...] = parts.scaled_rows(buffers.tokens.at[slot], factors, recurrence.kind).astype(scaled.dtype)
        plgpu.commit_smem()
        kept = state * parts.row_factor(factors, parts.KEEP, state)
        added: tuple[Any, Ref] = (lambda: scaled.transpose((1, 0))), buffers.matrix.at[slot]
        (state,) = wgmma.add_products((kept,), added, interpret=plan.interpret)
        plan.ring.release(slot, buffers.empty)
        return state

    start = plgpu.load(recurrence.start, layout=plgpu.Layout.WGMMA, optimized=False)
    state = lax.fori_loop(0, chunks, step, start)
    if recurrence.end is not None:
        recurrence.end[...] = state
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
