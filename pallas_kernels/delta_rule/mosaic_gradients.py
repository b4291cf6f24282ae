"""Gradients within the chunks of the gated delta rule, from the states and the states' gradients, without a recurrence.

With the notation of `mosaic_backward`, D_ij = e^(G_i - G_j) of visible tokens, and for each token

    d_scores = D scale (d_out new^T),  below = D (y new^T) below the diagonal
    d_q  = e^G scale (d_out S^T) + d_scores k
    read = below k + e^G (y S^T),  kept = e^(G_C - G) (new d_S'^T),  written = kept + d_scores^T q - (beta below)^T k
    d_k  = written - beta read,  d_v = beta y,  d_beta = y . v - k . read
    d_G  = q . d_q - beta k . read - k . written;  to d_G_C are added sum(k . kept) and e^(G_C) <S, d_S'>.

Signs are such that no product is negated: the compiler would do that before the product has ended, and wait for it.

One warpgroup computes what follows from d_out (`d_scores`, d_q), another the gradients of keys; slices of 64 value
columns are loaded for both by a third one.

Dims: B batch, T tokens, n chunks of C tokens, K key heads, N value heads, D key width, V value width.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.mosaic_parts import (
    BETA,
    CHUNK,
    FINE,
    GATES,
    GROWN,
    REST,
    SLICE,
    TOTAL,
    TOTAL_AGAIN,
)
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

_CONSUMERS = 2
_STAGES = 2
_SQUARE = CHUNK, CHUNK
_PIECE = 64
"""Columns of the states that are multiplied elementwise at a time: registers are scarce."""
_QUERY_SUMS = 2
"""Rows of the sums for queries: q . d_q and y . v; then come those of S d_S', one row for each slice."""
_KEY_SUMS = 3
"""Rows of the sums for keys: k . read, k . written and k . kept."""


class ChunkInputs(NamedTuple):
    """Arrays that the gradients within chunks are computed from, or references to them in the kernel.

    Attributes:
        q, k: [B, T, K, D].
        v, d_out, y: [B, T, N, V].
        states, d_states: transposed state before each chunk and gradient of the one after it, [B, N, n, V, D].
        new: transposed values that each chunk adds to the state, [B, N, n, V, C].
        gates: see `mosaic_parts.TOTAL`, float32 [B, N, n, 7, C].
        factor: power of two that gradients are multiplied by, float32 [1].
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    states: Any
    d_states: Any
    new: Any
    y: Any
    gates: Any
    factor: Any


@dataclass(frozen=True)
class _Config:
    """Compile-time description of the kernel: factor of the queries, slices of values, documents, programs."""

    scale: float
    slices: int
    packed: bool
    programs: int
    interpret: bool

    @property
    def ring(self) -> Ring:
        return Ring(_STAGES, self.interpret)


class _Buffers(NamedTuple):
    """Shared memory and barriers.

    The arrays up to `slice_gates` have a leading dim of stages, each for a slice of values; the others are for a chunk.
    """

    states: Ref
    d_states: Ref
    new: Ref
    y: Ref
    v: Ref
    d_out: Ref
    slice_gates: Ref
    q: Ref
    k: Ref
    gates: Ref
    first: Ref | None
    scores: Ref
    below: Ref
    d_q: Ref
    d_k: Ref
    d_v: Ref
    query_sums: Ref
    key_sums: Ref
    slice_full: Ref
    slice_empty: Ref
    chunk_full: Ref
    chunk_empty: Ref
    scored: Ref
    scores_free: Ref


class _Outputs(NamedTuple):
    """Results of the kernel: their types, references to them, or arrays; d_q and d_k are of value heads, in `FINE`."""

    d_q: Any
    d_k: Any
    d_v: Any
    query_sums: Any
    key_sums: Any


class _Item(NamedTuple):
    """A chunk of a value head."""

    batch: Index
    head: Index
    chunk: Index

    @property
    def tokens(self) -> Any:
        return pl.ds(self.chunk * CHUNK, CHUNK)

    @property
    def matrix(self) -> tuple[Index, Index, Index]:
        return self.batch, self.head, self.chunk


def chunk_gradients(
    inputs: ChunkInputs, first: Int[Array, "B n C"] | None, *, scale: float, programs: int, interpret: bool
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T N V"], Float[Array, "2 B N n C"]]:
    """Return the gradients of q, k and v in the dtype of v, and those of G and beta times `factor`.

    Args:
        inputs: see there; q, k, and what depends on gradients in `FINE`.
        first: for each token the first one of its chunk that it sees; None if it sees all earlier ones.
        scale: factor of the queries.
        programs: programs that run at a time, one on each multiprocessor.
        interpret: True to interpret the kernel on a CPU.
    """
    batch, tokens, heads, value_width = inputs.v.shape
    key_heads, width = inputs.k.shape[2:]
    gates = inputs.gates
    slices = value_width // SLICE
    config = _Config(scale, slices, first is not None, programs, interpret)
    key_like = jax.ShapeDtypeStruct((batch, tokens, heads, width), FINE)
    sums = (jax.ShapeDtypeStruct((*gates.shape[:3], rows, CHUNK), jnp.float32) for rows in _sum_rows(slices))
    kernel = pipeline.launch(
        "delta_rule_gradients",
        functools.partial(_body, config),
        consumers=_CONSUMERS,
        programs=programs,
        interpret=interpret,
        out_type=_Outputs(key_like, key_like, jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype), *sums),
        scratch_types=_scratch(config, width, inputs.v.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The threads of a warpgroup read nothing that others of it write, other than by TMA and products.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # No reduction leaves a warp.
        ),
    )
    found = _Outputs(*kernel(*inputs, *([] if first is None else [first])))

    def of_group(x: jax.Array) -> jax.Array:
        """[B, T, N, D] -> [B, T, K, D], summed over the heads of a group."""
        x = x.reshape(batch, tokens, key_heads, -1, width).astype(jnp.float32).sum(3)
        return (x / inputs.factor).astype(inputs.v.dtype)

    return of_group(found.d_q), of_group(found.d_k), found.d_v, _gate_gradients(gates, found)


def _sum_rows(slices: int) -> tuple[int, int]:
    return _QUERY_SUMS + slices, _KEY_SUMS


def _gate_gradients(gates: jax.Array, found: Any) -> Float[Array, "2 B N n C"]:
    """Return the gradients of G and beta from the sums over each token's columns."""
    query, y_v = found.query_sums[..., 0, :], found.query_sums[..., 1, :]
    states = found.query_sums[..., _QUERY_SUMS:, :].sum((-2, -1))
    read, written, kept = (found.key_sums[..., row, :] for row in range(_KEY_SUMS))
    d_total = query - gates[..., BETA, :] * read - written
    d_total = d_total.at[..., -1].add(kept.sum(-1) + gates[..., GROWN, -1] * states)
    return jnp.stack((d_total, y_v - read))


def _scratch(config: _Config, width: int, dtype: Any) -> _Buffers:
    def tile(rows: int, columns: int, dtype: Any = FINE, stages: int = _STAGES) -> Any:
        return tiled_smem((stages, rows, columns), dtype)

    def single(columns: int, dtype: Any = FINE) -> Any:
        return tiled_smem((CHUNK, columns), dtype)

    query_rows, key_rows = _sum_rows(config.slices)
    return _Buffers(
        states=tile(SLICE, width),
        d_states=tile(SLICE, width),
        new=tile(SLICE, CHUNK),
        y=tile(CHUNK, SLICE),
        v=tile(CHUNK, SLICE, dtype),
        d_out=tile(CHUNK, SLICE, dtype),
        slice_gates=plgpu.SMEM((_STAGES, GATES, CHUNK), jnp.float32),
        q=single(width),
        k=single(width),
        gates=plgpu.SMEM((GATES, CHUNK), jnp.float32),
        first=plgpu.SMEM((CHUNK,), jnp.int32) if config.packed else None,
        scores=single(CHUNK),
        below=single(CHUNK),
        d_q=single(width),
        d_k=single(width),
        d_v=single(SLICE, dtype),
        query_sums=plgpu.SMEM((query_rows, CHUNK), jnp.float32),
        key_sums=plgpu.SMEM((key_rows, CHUNK), jnp.float32),
        slice_full=plgpu.Barrier(num_arrivals=7, num_barriers=_STAGES),
        slice_empty=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
        chunk_full=plgpu.Barrier(num_arrivals=4 if config.packed else 3),
        chunk_empty=plgpu.Barrier(num_arrivals=_CONSUMERS),
        scored=plgpu.Barrier(),
        scores_free=plgpu.Barrier(),
    )


def _body(config: _Config, *refs: Ref) -> None:
    count = len(ChunkInputs._fields)
    inputs = ChunkInputs(*refs[:count])
    first = refs[count] if config.packed else None
    refs = refs[count + config.packed :]
    outputs = _Outputs(*refs[: len(_Outputs._fields)])
    buffers = _Buffers(*refs[len(_Outputs._fields) :])
    batch, heads, chunks = inputs.gates.shape[:3]
    total = batch * heads * chunks
    program = lax.axis_index("program")
    items = lax.div(total - program + config.programs - 1, config.programs)

    def item(number: Index) -> _Item:
        # Heads that share their keys are computed at the same time.
        index = program + number * config.programs
        row = lax.div(index, heads)
        return _Item(lax.div(row, chunks), lax.rem(index, heads), lax.rem(row, chunks))

    def produce() -> None:
        load = functools.partial(_load_chunk, config, inputs, first, buffers)
        lax.fori_loop(0, items, lambda number, _: load(number, item(number)), None)
        config.ring.drain(items * config.slices, buffers.slice_empty)

        @pl.when(items > 0)
        def _():
            plgpu.barrier_wait(buffers.chunk_empty)

    def consume() -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            compute = functools.partial(_compute_queries, config, inputs.factor[0], buffers, outputs)
            lax.fori_loop(0, items, lambda number, _: compute(number, item(number)), None)
            plgpu.barrier_wait(buffers.scores_free)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_arrive(buffers.scores_free)
            compute = functools.partial(_compute_keys, config, buffers, outputs)
            lax.fori_loop(0, items, lambda number, _: compute(number, item(number)), None)
            plgpu.wait_smem_to_gmem(0)

    pipeline.specialize(lax.axis_index("warpgroup"), _CONSUMERS, consume, produce)


def _load_chunk(
    config: _Config, inputs: ChunkInputs, first: Ref | None, buffers: _Buffers, number: Index, item: _Item
) -> None:
    """Load the slices of a chunk, then what is needed at its end."""
    for part in range(config.slices):
        count = number * config.slices + part
        slot = config.ring.slot(count)
        full = buffers.slice_full.at[slot]
        columns = pl.ds(part * SLICE, SLICE)
        config.ring.acquire(count, buffers.slice_empty)
        for source, target in ((inputs.d_out, buffers.d_out), (inputs.y, buffers.y), (inputs.v, buffers.v)):
            plgpu.copy_gmem_to_smem(source.at[item.batch, item.tokens, item.head, columns], target.at[slot], full)
        for source, target in (
            (inputs.states, buffers.states),
            (inputs.new, buffers.new),
            (inputs.d_states, buffers.d_states),
        ):
            plgpu.copy_gmem_to_smem(source.at[(*item.matrix, columns)], target.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.gates.at[item.matrix], buffers.slice_gates.at[slot], full)

    @pl.when(number > 0)
    def _():
        plgpu.barrier_wait(buffers.chunk_empty)

    key_head = lax.div(item.head, inputs.v.shape[2] // inputs.k.shape[2])
    for source, target in ((inputs.q, buffers.q), (inputs.k, buffers.k)):
        plgpu.copy_gmem_to_smem(source.at[item.batch, item.tokens, key_head], target, buffers.chunk_full)
    plgpu.copy_gmem_to_smem(inputs.gates.at[item.matrix], buffers.gates, buffers.chunk_full)
    if first is not None and buffers.first is not None:
        plgpu.copy_gmem_to_smem(first.at[item.batch, item.chunk], buffers.first, buffers.chunk_full)


def _release(config: _Config, barrier: Ref) -> None:
    if config.interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def _load_tile(ref: Ref) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _rows_of(ref: Ref, columns: int) -> jax.Array:
    """Return one number for each token, [C], as a matrix [C, columns] that has them in its rows."""
    return lax.broadcast_in_dim(wgmma.load_rows(ref), (CHUNK, columns), [0])


def _decay(buffers: _Buffers) -> tuple[jax.Array, jax.Array]:
    """Return e^(G_i - G_j) of visible tokens j, 0 of others; and which tokens j are before i."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, _SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in range(2))
    visible = row >= column
    if buffers.first is not None:
        visible = visible & (_rows_of(buffers.first, CHUNK) <= column)
    columns = lax.broadcast_in_dim(wgmma.load_columns(buffers.gates.at[TOTAL_AGAIN]), _SQUARE, [1])
    difference = _rows_of(buffers.gates.at[TOTAL], CHUNK) - columns
    return jnp.where(visible, jnp.exp(jnp.where(visible, difference, 0.0)), 0.0), row > column


def _compute_queries(
    config: _Config, factor: jax.Array, buffers: _Buffers, outputs: _Outputs, number: Index, item: _Item
) -> None:
    """Compute d_q and d_v of a chunk, the gradients of its scores for the other warpgroup, and sums."""
    width = buffers.k.shape[1]

    def sum_slices(d_q: Accumulator, scores: Accumulator) -> tuple[jax.Array, jax.Array]:
        y_v = wgmma.filled_rows(0.0, CHUNK)
        for part in range(config.slices):
            slot = config.ring.slot(number * config.slices + part)
            plgpu.barrier_wait(buffers.slice_full.at[slot])
            left = (_load_tile(buffers.d_out.at[slot]) * factor).astype(FINE)
            d_q.add(left, buffers.states.at[slot])
            scores.add(left, buffers.new.at[slot])
            y_v = y_v + _finish_slice(config, factor, buffers, outputs, slot, part, item)
            if not config.interpret:
                plgpu.wgmma_wait(0)
            _release(config, buffers.slice_empty.at[slot])
        buffers.query_sums[1] = y_v
        return d_q.load(), scores.load()

    d_q, scores = wgmma.accumulate(sum_slices, (CHUNK, width), _SQUARE, interpret=config.interpret)
    plgpu.barrier_wait(buffers.chunk_full)
    decay, _ = _decay(buffers)
    left = (scores * (decay * config.scale)).astype(FINE)
    plgpu.barrier_wait(buffers.scores_free)
    buffers.scores[...] = left
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.scored)

    def add_scores(total: Accumulator) -> jax.Array:
        total.add(left, buffers.k)
        return total.load()

    start = d_q * (_rows_of(buffers.gates.at[GROWN], width) * config.scale)
    d_q = wgmma.accumulate(add_scores, start, interpret=config.interpret)
    buffers.query_sums[0] = (d_q * _load_tile(buffers.q)).sum(axis=1)
    _release(config, buffers.chunk_empty)
    buffers.d_q[...] = d_q.astype(FINE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.d_q, outputs.d_q.at[item.batch, item.tokens, item.head])
    plgpu.copy_smem_to_gmem(buffers.query_sums, outputs.query_sums.at[item.matrix])


def _finish_slice(
    config: _Config, factor: jax.Array, buffers: _Buffers, outputs: _Outputs, slot: Index, part: int, item: _Item
) -> jax.Array:
    """Store d_v of a slice, and the sums of S d_S'; return those of y v. All while the tensor cores multiply."""
    y = _load_tile(buffers.y.at[slot])
    d_v = y * (_rows_of(buffers.slice_gates.at[slot, BETA], SLICE) * (1 / factor))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffers.d_v[...] = d_v.astype(buffers.d_v.dtype)
    plgpu.commit_smem()
    columns = pl.ds(part * SLICE, SLICE)
    plgpu.copy_smem_to_gmem(buffers.d_v, outputs.d_v.at[item.batch, item.tokens, item.head, columns])
    y_v = (y * _load_tile(buffers.v.at[slot])).sum(axis=1)
    products = wgmma.filled_rows(0.0, SLICE)
    for first in range(0, buffers.states.shape[2], _PIECE):
        piece = slot, slice(None), pl.ds(first, _PIECE)
        products += (_load_tile(buffers.states.at[piece]) * _load_tile(buffers.d_states.at[piece])).sum(axis=1)
    buffers.query_sums[_QUERY_SUMS + part] = products
    return y_v


def _compute_keys(config: _Config, buffers: _Buffers, outputs: _Outputs, number: Index, item: _Item) -> None:
    """Compute d_k of a chunk, and sums."""
    width = buffers.k.shape[1]

    def sum_slices(kept: Accumulator, read: Accumulator, below: Accumulator) -> tuple[jax.Array, ...]:
        for part in range(config.slices):
            slot = config.ring.slot(number * config.slices + part)
            plgpu.barrier_wait(buffers.slice_full.at[slot])
            kept.add(buffers.new.at[slot].transpose((1, 0)), buffers.d_states.at[slot])
            read.add(buffers.y.at[slot], buffers.states.at[slot])
            below.add(buffers.y.at[slot], buffers.new.at[slot])
            if not config.interpret:
                plgpu.wgmma_wait(0)
            _release(config, buffers.slice_empty.at[slot])
        return kept.load(), read.load(), below.load()

    kept, read, below = wgmma.accumulate(
        sum_slices, (CHUNK, width), (CHUNK, width), _SQUARE, interpret=config.interpret
    )
    plgpu.barrier_wait(buffers.chunk_full)
    decay, before = _decay(buffers)
    below = jnp.where(before, below * decay, 0.0)
    left = below.astype(FINE)
    buffers.below[...] = (below * -_rows_of(buffers.gates.at[BETA], CHUNK)).astype(FINE)
    plgpu.commit_smem()

    def add_below(total: Accumulator) -> jax.Array:
        total.add(left, buffers.k)
        return total.load()

    start = read * _rows_of(buffers.gates.at[GROWN], width)
    read = wgmma.accumulate(add_below, start, interpret=config.interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    keys = _load_tile(buffers.k)
    buffers.key_sums[0] = (read * keys).sum(axis=1)
    kept = kept * _rows_of(buffers.gates.at[REST], width)
    buffers.key_sums[2] = (kept * keys).sum(axis=1)

    def add_wrote(total: Accumulator) -> jax.Array:
        total.add(buffers.below.transpose((1, 0)), buffers.k)
        plgpu.barrier_wait(buffers.scored)
        total.add(buffers.scores.transpose((1, 0)), buffers.q)
        return total.load()

    written = wgmma.accumulate(add_wrote, kept, interpret=config.interpret)
    _release(config, buffers.scores_free)
    buffers.key_sums[1] = (written * _load_tile(buffers.k)).sum(axis=1)
    d_k = written - _rows_of(buffers.gates.at[BETA], width) * read
    _release(config, buffers.chunk_empty)
    buffers.d_k[...] = d_k.astype(FINE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.d_k, outputs.d_k.at[item.batch, item.tokens, item.head])
    plgpu.copy_smem_to_gmem(buffers.key_sums, outputs.key_sums.at[item.matrix])
