"""Backward of the gated delta rule for Hopper: recurrences of the state and of its gradient, then all chunks at a time.

With the notation of `mosaic_forward`, d_S' the gradient of the state after a chunk and y that of (v - e^G (k S)) beta:

    d_new = inside^T d_out + e^(G_C - G) (k d_S')
    y     = solved^T d_new
    d_S   = e^(G_C) d_S' + (e^G scale q)^T d_out - (beta e^G k)^T y

`record_states` repeats the forward recurrence and stores each chunk's state and `new`; `reverse` stores d_S' and y.
All other gradients follow from those without a recurrence: d_v = beta y, and A has the gradient -y new^T below its
diagonal, as y new^T = solved^T (d_new (beta (v - e^G k S))^T) solved^T.

Gradients are multiplied by a power of two, `factor`, before they are rounded to float16, as they may be very small.

Dims: B batch, T tokens, n chunks of C tokens, K key heads, N value heads, D key width, V value width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.delta_rule.mosaic_forward import Solved
from pallas_kernels.delta_rule.mosaic_parts import (
    CHUNK,
    FINE,
    GATES,
    GROWN,
    READ,
    REST,
    SLICE,
    RecurrenceConfig,
    load_transposed,
    next_state,
    of_tokens,
    store_transposed,
)
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.wgmma import Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

_SQUARE = SLICE, CHUNK


class _Place(NamedTuple):
    """The head and the value columns of this warpgroup, and its number in the program."""

    batch: Index
    head: Index
    columns: Any
    warpgroup: jax.Array


def _launch(name: str, body: Callable[..., None], config: RecurrenceConfig, like: jax.Array, **parameters: Any) -> Any:
    """Build a recurrence over chunks: a program for each batch entry, head, and `config.slices` slices of values."""
    batch, _, heads, width = like.shape
    return pipeline.launch(
        name,
        body,
        consumers=config.slices,
        interpret=config.interpret,
        grid=(width // (SLICE * config.slices), heads, batch),
        grid_names=("part", "head", "batch"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The threads of a warpgroup read nothing that others of it write, other than by TMA.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        **parameters,
    )


def _columns(config: RecurrenceConfig, warpgroup: Index) -> Any:
    return pl.ds((lax.axis_index("part") * config.slices + warpgroup) * SLICE, SLICE)


def _place(config: RecurrenceConfig) -> _Place:
    warpgroup = lax.axis_index("warpgroup")
    return _Place(lax.axis_index("batch"), lax.axis_index("head"), _columns(config, warpgroup), warpgroup)


def _state_like(v: jax.Array, k: jax.Array, gates: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of the transposed states of all chunks, [B, N, n, V, D]."""
    return jax.ShapeDtypeStruct((*gates.shape[:3], v.shape[3], k.shape[3]), FINE)


# --- the states before each chunk --------------------------------------------------------------------------------


class _RecordBuffers(NamedTuple):
    """Shared memory and barriers of `record_states`; the leading dim counts stages, of the last two tiles slices."""

    k: Ref
    v: Ref
    solved: Ref
    gates: Ref
    state: Ref
    new: Ref
    k_full: Ref
    solved_full: Ref
    empty: Ref


def record_states(
    config: RecurrenceConfig,
    chunks: Solved,
    v: Float[Array, "B T N V"],
    gates: Float[Array, "B N n 7 C"],
    state: Float[Array, "B N V D"],
) -> tuple[Float[Array, "B N n V D"], Float[Array, "B N n V C"]]:
    """Compute the state before each chunk, and the values that the chunk adds to it (`new`), both transposed."""
    stages = config.stages
    width = chunks.k.shape[3]
    states = _state_like(v, chunks.k, gates)
    kernel = _launch(
        "delta_rule_states",
        functools.partial(_record_body, config),
        config,
        v,
        out_type=(states, jax.ShapeDtypeStruct((*states.shape[:4], CHUNK), FINE)),
        scratch_types=_RecordBuffers(
            k=tiled_smem((stages, CHUNK, width), FINE),
            v=tiled_smem((stages, config.slices, CHUNK, SLICE), v.dtype),
            solved=tiled_smem((stages, CHUNK, CHUNK), FINE),
            gates=plgpu.SMEM((stages, GATES, CHUNK), jnp.float32),
            state=tiled_smem((config.slices, SLICE, width), FINE),
            new=tiled_smem((config.slices, SLICE, CHUNK), FINE),
            k_full=plgpu.Barrier(num_arrivals=2 + config.slices, num_barriers=stages),
            solved_full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=config.slices, num_barriers=stages),
        ),
    )
    return tuple(kernel(chunks.k, v, chunks.solved, gates, state))


def _record_body(
    config: RecurrenceConfig, k: Ref, v: Ref, solved: Ref, gates: Ref, first: Ref, states: Ref, news: Ref, *scratch: Ref
) -> None:
    buffers = _RecordBuffers(*scratch)
    place = _place(config)
    chunks = gates.shape[2]

    def load(chunk: Index, slot: Index, acquire: Callable[..., None]) -> None:
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        matrix = place.batch, place.head, chunk
        k_full = buffers.k_full.at[slot]
        key_head = lax.div(place.head, v.shape[2] // k.shape[2])
        acquire(buffers.empty)
        plgpu.copy_gmem_to_smem(k.at[place.batch, tokens, key_head], buffers.k.at[slot], k_full)
        plgpu.copy_gmem_to_smem(gates.at[matrix], buffers.gates.at[slot], k_full)
        for index in range(config.slices):
            values = v.at[place.batch, tokens, place.head, _columns(config, index)]
            plgpu.copy_gmem_to_smem(values, buffers.v.at[slot, index], k_full)
        plgpu.copy_gmem_to_smem(solved.at[matrix], buffers.solved.at[slot], buffers.solved_full.at[slot])

    def produce() -> None:
        config.ring.produce(0, chunks, load)
        config.ring.drain(chunks, buffers.empty)

    def step(chunk: Index, state: jax.Array) -> jax.Array:
        def store(staging: Ref, value: jax.Array, target: Ref) -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            staging[...] = value.astype(FINE)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, target.at[place.batch, place.head, chunk, place.columns])

        slot = config.ring.slot(chunk)
        after = next_state(
            config,
            buffers,
            slot,
            state,
            with_beta=False,
            store_state=lambda: store(buffers.state.at[place.warpgroup], state, states),
            store_new=lambda new: store(buffers.new.at[place.warpgroup], new, news),
        )
        config.ring.release(slot, buffers.empty)
        return after

    def consume() -> None:
        own = place.batch, place.head, place.columns
        start = plgpu.load(first.at[own], layout=plgpu.Layout.WGMMA, optimized=False)
        lax.fori_loop(0, chunks, step, start)
        plgpu.wait_smem_to_gmem(0)

    pipeline.specialize(place.warpgroup, config.slices, consume, produce)


# --- the gradients of the states after each chunk ------------------------------------------------------------------


class _ReverseBuffers(NamedTuple):
    """Shared memory and barriers of `reverse`; the leading dim counts stages, of the last two tiles slices."""

    q: Ref
    k: Ref
    d_out: Ref
    solved: Ref
    inside: Ref
    gates: Ref
    d_state: Ref
    y: Ref
    d_out_full: Ref
    k_full: Ref
    q_full: Ref
    solved_full: Ref
    empty: Ref


def reverse(
    config: RecurrenceConfig,
    chunks: Solved,
    d_out: Float[Array, "B T N V"],
    gates: Float[Array, "B N n 7 C"],
    factor: Float[Array, " 1"],
    d_last: Float[Array, "B N V D"],
) -> tuple[Float[Array, "B N n V D"], Float[Array, "B T N V"], Float[Array, "B N V D"]]:
    """Compute the gradients of the state after each chunk (transposed), y, and that of the first state (transposed).

    All are multiplied by `factor`, as `d_last` is already.
    """
    stages = config.stages
    width = chunks.k.shape[3]
    square = tiled_smem((stages, CHUNK, CHUNK), FINE)
    token_rows = tiled_smem((stages, CHUNK, width), FINE)
    barrier = plgpu.Barrier(num_barriers=stages)
    kernel = _launch(
        "delta_rule_reverse",
        functools.partial(_reverse_body, config),
        config,
        d_out,
        out_type=(
            _state_like(d_out, chunks.k, gates),
            jax.ShapeDtypeStruct(d_out.shape, FINE),
            jax.ShapeDtypeStruct(d_last.shape, d_last.dtype),
        ),
        scratch_types=_ReverseBuffers(
            q=token_rows,
            k=token_rows,
            d_out=tiled_smem((stages, config.slices, CHUNK, SLICE), d_out.dtype),
            solved=square,
            inside=square,
            gates=plgpu.SMEM((stages, GATES, CHUNK), jnp.float32),
            d_state=tiled_smem((config.slices, SLICE, width), FINE),
            y=tiled_smem((config.slices, CHUNK, SLICE), FINE),
            d_out_full=plgpu.Barrier(num_arrivals=2 + config.slices, num_barriers=stages),
            k_full=barrier,
            q_full=barrier,
            solved_full=barrier,
            empty=plgpu.Barrier(num_arrivals=config.slices, num_barriers=stages),
        ),
    )
    return tuple(kernel(*chunks, d_out, gates, factor, d_last))


class _ReverseInputs(NamedTuple):
    q: Ref
    k: Ref
    solved: Ref
    inside: Ref
    d_out: Ref
    gates: Ref
    factor: Ref
    d_last: Ref


def _reverse_body(config: RecurrenceConfig, *refs: Ref) -> None:
    inputs = _ReverseInputs(*refs[:8])
    d_states, y, d_first, *scratch = refs[8:]
    buffers = _ReverseBuffers(*scratch)
    place = _place(config)
    own = place.batch, place.head, place.columns
    chunks = inputs.gates.shape[2]

    def produce() -> None:
        config.ring.produce(0, chunks, functools.partial(_load_reverse, config, inputs, buffers, place))
        config.ring.drain(chunks, buffers.empty)

    def consume() -> None:
        factor = inputs.factor[0]

        def step(index: Index, d_state: jax.Array) -> jax.Array:
            chunk = chunks - 1 - index
            slot = config.ring.slot(index)

            def store_state(value: jax.Array) -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staging = buffers.d_state.at[place.warpgroup]
                staging[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, d_states.at[place.batch, place.head, chunk, place.columns])

            def store_y(value: jax.Array) -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staging = buffers.y.at[place.warpgroup]
                store_transposed(staging, value.astype(FINE))
                plgpu.commit_smem()
                tokens = pl.ds(chunk * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(staging, y.at[place.batch, tokens, place.head, place.columns])

            d_state = _previous_chunk(config, buffers, slot, d_state, factor, store_state, store_y)
            config.ring.release(slot, buffers.empty)
            return d_state

        start = plgpu.load(inputs.d_last.at[own], layout=plgpu.Layout.WGMMA, optimized=False)
        d_first.at[own][...] = lax.fori_loop(0, chunks, step, start)
        plgpu.wait_smem_to_gmem(0)

    pipeline.specialize(place.warpgroup, config.slices, consume, produce)


def _load_reverse(
    config: RecurrenceConfig,
    inputs: _ReverseInputs,
    buffers: _ReverseBuffers,
    place: _Place,
    index: Index,
    slot: Index,
    acquire: Callable[..., None],
) -> None:
    chunk = inputs.gates.shape[2] - 1 - index
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    matrix = place.batch, place.head, chunk
    key_head = lax.div(place.head, inputs.d_out.shape[2] // inputs.k.shape[2])
    full = buffers.d_out_full.at[slot]
    acquire(buffers.empty)
    for part in range(config.slices):
        source = inputs.d_out.at[place.batch, tokens, place.head, _columns(config, part)]
        plgpu.copy_gmem_to_smem(source, buffers.d_out.at[slot, part], full)
    plgpu.copy_gmem_to_smem(inputs.inside.at[matrix], buffers.inside.at[slot], full)
    plgpu.copy_gmem_to_smem(inputs.gates.at[matrix], buffers.gates.at[slot], full)
    keys = inputs.k.at[place.batch, tokens, key_head]
    plgpu.copy_gmem_to_smem(keys, buffers.k.at[slot], buffers.k_full.at[slot])
    queries = inputs.q.at[place.batch, tokens, key_head]
    plgpu.copy_gmem_to_smem(queries, buffers.q.at[slot], buffers.q_full.at[slot])
    plgpu.copy_gmem_to_smem(inputs.solved.at[matrix], buffers.solved.at[slot], buffers.solved_full.at[slot])


def _previous_chunk(
    config: RecurrenceConfig,
    buffers: _ReverseBuffers,
    slot: Index,
    d_state: jax.Array,
    factor: jax.Array,
    store_state: Callable[[jax.Array], None],
    store_y: Callable[[jax.Array], None],
) -> jax.Array:
    """Return the gradient of the state before a chunk, transposed, [64, D] of this warpgroup.

    `store_state`, of d_state, and `store_y` are called while the tensor cores multiply.
    """
    k = buffers.k.at[slot]
    gates = buffers.gates.at[slot]

    def load_d_out() -> jax.Array:
        return load_transposed(buffers.d_out.at[slot, lax.axis_index("warpgroup")])

    def body(direct: Accumulator, found: Accumulator, before: Accumulator) -> jax.Array:
        direct.add((load_d_out() * factor).astype(FINE), buffers.inside.at[slot])
        plgpu.barrier_wait(buffers.k_full.at[slot])
        found.add(left, k.transpose((1, 0)))
        plgpu.barrier_wait(buffers.q_full.at[slot])
        # Loaded once more, as registers are scarce.
        queries = load_d_out() * (of_tokens(gates.at[GROWN]) * (config.scale * factor))
        before.add(queries.astype(FINE), buffers.q.at[slot])
        store_state(left)
        plgpu.barrier_wait(buffers.solved_full.at[slot])
        d_new = direct.load(pending=1) + of_tokens(gates.at[REST]) * found.load(pending=1)

        def solve(y: Accumulator) -> jax.Array:
            y.add(d_new.astype(FINE), buffers.solved.at[slot])
            return y.load()

        y = wgmma.accumulate(solve, _SQUARE, interpret=config.interpret)
        before.add((y * of_tokens(gates.at[READ])).astype(FINE), k)
        store_y(y)
        return before.load()

    plgpu.barrier_wait(buffers.d_out_full.at[slot])
    left = d_state.astype(FINE)
    kept = gates[GROWN, CHUNK - 1]
    return wgmma.accumulate(body, _SQUARE, _SQUARE, d_state * kept, interpret=config.interpret)
