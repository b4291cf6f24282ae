"""Hopper kernel of the gradients of the state space layer, from the states before and their gradients after all chunks.

A program computes one chunk of the tokens of one group: it takes one head of the group after the other, and sums the
gradients of B and C over these. One warpgroup computes with rows of the tokens that see (C, the gradient of y), the
other with rows of the tokens that are seen (B, x); both have the scores of the chunk, which all heads share, in
registers. With W = S * D * dt for the scores S and the decays D, G the gradient of the state after the chunk, and h the
state before it:

    dx = (S D)^T dy dt + ends (B G^T)
    dC = (sum over heads of (dy x^T D dt)) B + sum over heads of (seen dy) h
    dB = (sum over heads of (dy x^T D dt))^T C + sum over heads of (ends x) G

The gradients of the factors are sums over rows of these. In the gradient of L the products of a token with itself
cancel, for which both warpgroups need the same rounded weights.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.wgmma import Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu
from pallas_kernels.ssd import mosaic_parts as parts
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, FACTORS, Operand, Sequences, SsdPlan

_SUMS_SEEN = 4
"""Gradients of factors of the second warpgroup: of `TOTAL_AGAIN`, `STEP`, `ENDS`, and a part of `KEEP`."""
_HALF = 64
"""Columns of the state of which the first warpgroup computes the gradient of `KEEP`, if there are more."""


def _sums_seeing(width: int) -> int:
    """Return the number of gradients of factors of the first warpgroup: `TOTAL`, `SEEN`, and a part of `KEEP`."""
    return 3 if width > _HALF else 2


class GradientInputs(NamedTuple):
    """Inputs of the kernel.

    Attributes:
        sequences: Inputs of the forward.
        d_y: gradient of y, [B, T, N, P].
        states: state before each chunk, [B, N, n, P, S].
        d_states: gradient of the state after each chunk, [B, N, n, P, S].
    """

    sequences: Sequences
    d_y: Operand
    states: Operand
    d_states: Operand


class _Buffers(NamedTuple):
    """Shared memory and barriers; leading dims are stages, or (of `d_x` and the sums) heads in turn."""

    b: Ref
    c: Ref
    documents: Ref | None
    x: Ref
    d_y: Ref
    states: Ref
    d_states: Ref
    factors: Ref
    d_scores: Ref
    d_x: Ref
    sums_seeing: Ref
    sums_seen: Ref
    own_full: Ref
    full: Ref
    empty: Ref
    d_scores_full: Ref


class _Outputs(NamedTuple):
    d_x: Ref
    d_b: Ref
    d_c: Ref
    seeing: Ref
    seen: Ref


class _Place(NamedTuple):
    """Place of a program: sequence, chunk, group, part of the heads of the group, first head, number of heads."""

    batch: Index
    chunk: Index
    group: Index
    part: Index
    head: Index
    heads: int


class Gradients(NamedTuple):
    """Gradients of `Sequences`; those of b and c are float32 [parts, B, n C, G, S], to be summed over the parts."""

    x: jax.Array
    b: jax.Array
    c: jax.Array
    factors: Float[Array, "B N n FACTORS C"]


def gradients(plan: SsdPlan, inputs: GradientInputs, head_parts: int) -> Gradients:
    """Compute the gradients of x, b, c and the factors.

    Args:
        plan: Block sizes; `warpgroups` is 2, and a stage holds one head.
        inputs: Inputs; T is a multiple of 8 and at least `CHUNK`.
        head_parts: Number of programs that share the heads of a group in a chunk; divides their number.
    """
    x, b, _, factors, documents = inputs.sequences
    batch, _, heads, _ = x.shape
    groups, width = b.shape[2:]
    chunks = factors.shape[2]
    stages, dtype = plan.stages, x.dtype
    packed = documents is not None
    tokens = tiled_smem((stages, CHUNK, CHANNELS), dtype)
    states = tiled_smem((stages, CHANNELS, width), dtype)
    matrix = tiled_smem((CHUNK, width), dtype)
    scratch = _Buffers(
        b=matrix,
        c=matrix,
        documents=plgpu.SMEM((2, CHUNK), jnp.int32) if packed else None,
        x=tokens,
        d_y=tokens,
        states=states,
        d_states=states,
        factors=plgpu.SMEM((stages, FACTORS, CHUNK), jnp.float32),
        d_scores=tiled_smem((CHUNK, CHUNK), dtype),
        d_x=tiled_smem((2, CHUNK, CHANNELS), dtype),
        sums_seeing=plgpu.SMEM((2, _sums_seeing(width), CHUNK), jnp.float32),
        sums_seen=plgpu.SMEM((2, _SUMS_SEEN, CHUNK), jnp.float32),
        own_full=plgpu.Barrier(num_arrivals=2 + packed),
        full=plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        empty=pipeline.empty_barriers(2, stages, 1),
        d_scores_full=plgpu.Barrier(),
    )
    summed = jax.ShapeDtypeStruct((head_parts, batch, chunks * CHUNK, groups, width), jnp.float32)
    sums = (batch, heads, chunks)
    kernel = pipeline.launch(
        "ssd_gradients",
        functools.partial(_body, plan, head_parts),
        consumers=2,
        interpret=plan.interpret,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, dtype),
            summed,
            summed,
            jax.ShapeDtypeStruct((*sums, _sums_seeing(width), CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((*sums, _SUMS_SEEN, CHUNK), jnp.float32),
        ),
        grid=(groups * head_parts, chunks, batch),
        grid_names=("part", "chunk", "batch"),
        scratch_types=scratch,
        compiler_params=plan.compiler_params(),
    )
    d_x, d_b, d_c, seeing, seen = kernel(inputs)
    total, of_seen, *more = (seeing[..., row, :] for row in range(_sums_seeing(width)))
    again, step, ends, keep = (seen[..., row, :] for row in range(_SUMS_SEEN))
    keep = sum(more, keep)
    return Gradients(d_x, d_b, d_c, jnp.stack([total, step, of_seen, ends, keep, again], axis=-2))


def _body(plan: SsdPlan, head_parts: int, inputs: GradientInputs, *references: Any) -> None:
    inputs = GradientInputs(*inputs)
    inputs = inputs._replace(sequences=Sequences(*inputs.sequences))
    outputs = _Outputs(*references[: len(_Outputs._fields)])
    buffers = _Buffers(*references[len(_Outputs._fields) :])
    part = lax.axis_index("part")
    heads = inputs.d_y.shape[2] // lax.axis_size("part")
    place = _Place(
        lax.axis_index("batch"),
        lax.axis_index("chunk"),
        lax.div(part, head_parts),
        lax.rem(part, head_parts),
        part * heads,
        heads,
    )

    def consume() -> None:
        plgpu.barrier_wait(buffers.own_full)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(functools.partial(_compute_seeing, plan, buffers, place, outputs))
        pl.when(warpgroup == 1)(functools.partial(_compute_seen, plan, buffers, place, outputs))
        # The program may end, and the next one begin, once its shared memory has been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pipeline.specialize(lax.axis_index("warpgroup"), 2, consume, functools.partial(_load, plan, inputs, buffers, place))


def _load(plan: SsdPlan, inputs: GradientInputs, buffers: _Buffers, place: _Place) -> None:
    """Load B and C of the chunk, and then what each head has, as the loading warpgroup."""
    x, b, c, factors, documents = inputs.sequences
    rows = place.batch, pl.ds(place.chunk * CHUNK, CHUNK)
    plgpu.copy_gmem_to_smem(b.at[*rows, place.group], buffers.b, buffers.own_full)
    plgpu.copy_gmem_to_smem(c.at[*rows, place.group], buffers.c, buffers.own_full)
    if documents is not None and buffers.documents is not None:
        plgpu.copy_gmem_to_smem(documents.at[place.batch, place.chunk], buffers.documents, buffers.own_full)

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        acquire(buffers.empty)
        full = buffers.full.at[slot]
        head = place.head + index
        of_chunk = place.batch, head, place.chunk
        plgpu.copy_gmem_to_smem(factors.at[of_chunk], buffers.factors.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.d_y.at[*rows, head], buffers.d_y.at[slot], full)
        plgpu.copy_gmem_to_smem(x.at[*rows, head], buffers.x.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.d_states.at[of_chunk], buffers.d_states.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.states.at[of_chunk], buffers.states.at[slot], full)

    plan.ring.produce(0, place.heads, load)
    plan.ring.drain(place.heads, buffers.empty)


def _product(plan: SsdPlan, left: Ref, right: Ref) -> jax.Array:
    def body(sums: Accumulator) -> jax.Array:
        sums.add(left, right)
        return sums.load()

    return wgmma.accumulate(body, (left.shape[0], right.shape[1]), interpret=plan.interpret)


def _values(tokens: Ref) -> jax.Array:
    return plgpu.load(tokens, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _rounded(plan: SsdPlan, values: jax.Array) -> jax.Array:
    """Return float32 values rounded to bfloat16, in float32."""
    if plan.interpret:  # There XLA would remove a cast and its inverse.
        return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(jnp.bfloat16).astype(jnp.float32)


def _keep_gradient(buffers: _Buffers, slot: Index, first: int, columns: int) -> jax.Array:
    """Return the sums over some columns of the states times their gradients, for each of their rows."""
    part = slice(None), pl.ds(first, columns)
    return (_values(buffers.states.at[slot].at[part]) * _values(buffers.d_states.at[slot].at[part])).sum(axis=1)


def _compute_seeing(plan: SsdPlan, buffers: _Buffers, place: _Place, outputs: _Outputs) -> None:
    """Compute and store the gradient of C, and gradients of the factors of the tokens that see."""
    width = buffers.c.shape[1]
    scores = _product(plan, buffers.c, buffers.b.transpose((1, 0)))

    def step(index: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_scores, d_c = sums
        slot = plan.ring.slot(index)
        x, d_y, factors, states = (z.at[slot] for z in (buffers.x, buffers.d_y, buffers.factors, buffers.states))
        plgpu.barrier_wait(buffers.full.at[slot])

        def weigh(accumulator: Accumulator) -> tuple[jax.Array, jax.Array]:
            accumulator.add(d_y, x.transpose((1, 0)))
            decay = parts.decays(factors, buffers.documents, scores)
            weights = _rounded(plan, scores * decay)
            d_weights = accumulator.load() * parts.column_factor(factors, parts.STEP, scores)
            return (d_weights * weights).sum(axis=1), d_scores + d_weights * decay

        total, d_scores = wgmma.accumulate(weigh, (CHUNK, CHUNK), interpret=plan.interpret)

        def see(d_c: Accumulator, from_state: Accumulator) -> tuple[jax.Array, jax.Array]:
            from_state.add(buffers.c, states.transpose((1, 0)))
            d_c.add(parts.scaled_rows(d_y, factors, parts.SEEN).astype(d_y.dtype), states)
            seen = (from_state.load(pending=1) * _values(d_y)).sum(axis=1)
            return seen, d_c.load()

        seen, d_c = wgmma.accumulate(see, d_c, (CHUNK, CHANNELS), interpret=plan.interpret)
        keep = [_keep_gradient(buffers, slot, 0, _HALF)] if width > _HALF else []
        plan.ring.release(slot, buffers.empty)
        staging = buffers.sums_seeing.at[lax.rem(index, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        for row, value in enumerate([total * math.log(2), seen, *keep]):
            staging.at[row][...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, outputs.seeing.at[place.batch, place.head + index, place.chunk])
        return d_scores, d_c

    start = wgmma.zeros(CHUNK, CHUNK), wgmma.zeros(CHUNK, width)
    d_scores, d_c = lax.fori_loop(0, place.heads, step, start)
    narrow = d_scores.astype(buffers.d_scores.dtype)
    buffers.d_scores[...] = narrow
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.d_scores_full)
    (d_c,) = wgmma.add_products((d_c,), ((lambda: narrow), buffers.b), interpret=plan.interpret)
    rows = pl.ds(place.chunk * CHUNK, CHUNK)
    outputs.d_c[place.part, place.batch, rows, place.group] = d_c


def _compute_seen(plan: SsdPlan, buffers: _Buffers, place: _Place, outputs: _Outputs) -> None:
    """Compute and store the gradients of x and B, and gradients of the factors of the tokens that are seen."""
    width = buffers.b.shape[1]
    scores = _product(plan, buffers.b, buffers.c.transpose((1, 0)))
    first = _HALF if width > _HALF else 0

    def step(index: Index, d_b: jax.Array) -> jax.Array:
        slot = plan.ring.slot(index)
        x, d_y, factors, d_states = (z.at[slot] for z in (buffers.x, buffers.d_y, buffers.factors, buffers.d_states))
        head = place.head + index
        plgpu.barrier_wait(buffers.full.at[slot])

        def sums_of(from_state: Accumulator, within: Accumulator) -> tuple[jax.Array, jax.Array, jax.Array]:
            from_state.add(buffers.b, d_states.transpose((1, 0)))
            decay = parts.decays(factors, buffers.documents, scores, queries_are_rows=False)
            within.add((scores * decay).astype(x.dtype), d_y)
            value = from_state.load(pending=1)
            ends = (value * _values(x)).sum(axis=1)
            d_x = value * parts.row_factor(factors, parts.ENDS, value)
            value = within.load()
            own = (value * _values(x)).sum(axis=1)
            return d_x + value * parts.row_factor(factors, parts.STEP, value), ends, own

        shape = CHUNK, CHANNELS
        d_x, ends, own = wgmma.accumulate(sums_of, shape, shape, interpret=plan.interpret)
        again = own * wgmma.load_rows(factors.at[parts.STEP]) * -math.log(2)
        keep = _keep_gradient(buffers, slot, first, width - first)
        scaled: tuple[Any, Ref] = (
            lambda: parts.scaled_rows(x, factors, parts.ENDS).astype(x.dtype),
            d_states,
        )
        (d_b,) = wgmma.add_products((d_b,), scaled, interpret=plan.interpret)
        plan.ring.release(slot, buffers.empty)
        turn = lax.rem(index, 2)
        staging = buffers.sums_seen.at[turn]
        plgpu.wait_smem_to_gmem(2, wait_read_only=True)
        for row, value in enumerate((again, own, ends, keep)):
            staging.at[row][...] = value
        buffers.d_x.at[turn][...] = d_x.astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, outputs.seen.at[place.batch, head, place.chunk])
        rows = pl.ds(place.chunk * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(buffers.d_x.at[turn], outputs.d_x.at[place.batch, rows, head])
        return d_b

    d_b = lax.fori_loop(0, place.heads, step, wgmma.zeros(CHUNK, width))
    plgpu.barrier_wait(buffers.d_scores_full)
    last: tuple[Any, Ref] = (lambda: buffers.d_scores.transpose((1, 0))), buffers.c
    (d_b,) = wgmma.add_products((d_b,), last, interpret=plan.interpret)
    rows = pl.ds(place.chunk * CHUNK, CHUNK)
    outputs.d_b[place.part, place.batch, rows, place.group] = d_b
