"""Forward of the gated delta rule for Hopper: a kernel for all chunks at a time, and a recurrence over chunks.

For each chunk of C = 64 tokens, with G the sum of log decays within it, A_ij = beta_i (k_i . k_j) e^(G_i - G_j) for
j < i, and S the state before it, the values that its tokens add to the state are

    new = solved beta (v - e^G (k S)),  solved = (I + A)^-1
    out = e^G (q S) scale + inside new,  inside_ij = scale (q_i . k_j) e^(G_i - G_j) for j <= i
    S  <- e^(G_C) S + (e^(G_C - G) k)^T new.

`solve_chunks` computes `solved` and `inside`, which are small, for all chunks at a time; `recur` does the rest. In the
recurrence a warpgroup owns 64 value columns of the state of one head. It keeps their transpose, [64, D], in registers,
as it does all products that depend on the state: each is the left operand of the next one, so that none has to pass
through shared memory, which would take longer than the products. If there are few heads, several programs compute the
same columns, each the outputs of its own chunks (`pallas_kernels.hopper.replay`).

Dims: B batch, T tokens, n chunks of C tokens, K key heads, N value heads, D key width, V value width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.mosaic_parts import (
    BETA,
    CHUNK,
    FADED,
    FINE,
    GATES,
    GROWN,
    REST,
    SLICE,
    TOTAL,
    TOTAL_AGAIN,
    RecurrenceConfig,
    load_transposed,
    next_state,
    of_tokens,
    store_transposed,
)
from pallas_kernels.hopper import pipeline, replay, wgmma
from pallas_kernels.hopper.wgmma import Accumulator, tiled_smem
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu, speed_up_lowering

_SOLVERS = 3
"""Warpgroups of a program that solve chunks, as many as fit in registers and shared memory."""
_SHARE = 5 / 8
"""Products for the state of a chunk, relative to those for its state and its outputs, with keys of 128."""
_HALFWAY = 16
"""Size of the inverted blocks when the next chunk's inputs are loaded."""
# --- all chunks at a time ----------------------------------------------------------------------------------------


class Solved(NamedTuple):
    """Operands of the recurrences: the queries and keys, and the matrices of each chunk, all in `FINE`."""

    q: Float[Array, "B T K D"]
    k: Float[Array, "B T K D"]
    solved: Float[Array, "B N n C C"]
    inside: Float[Array, "B N n C C"]


class _SolveBuffers(NamedTuple):
    """Shared memory of the kernel that solves chunks; the leading dim counts warpgroups.

    `below` is A, `inverse` the inverse of I + A so far, and at the end `solved`. `q` and `k` are converted in place.
    `beta` is needed longer than `gates`; None if `solved` is not multiplied by it.
    """

    q: Ref
    k: Ref
    gates: Ref
    first: Ref | None
    beta: Ref | None
    below: Ref
    inverse: Ref
    inside: Ref
    full: Ref


class _SolveArrays(NamedTuple):
    """Inputs and outputs of the kernel that solves chunks, in global memory; the outputs as in `Solved`."""

    q: Ref
    k: Ref
    gates: Ref
    first: Ref | None
    fine_q: Ref
    fine_k: Ref
    solved: Ref
    inside: Ref


def solve_chunks(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    gates: Float[Array, "B N n 7 C"],
    first: Int[Array, "B n C"] | None,
    *,
    scale: float,
    with_beta: bool = False,
    programs: int = 132,
    interpret: bool = False,
) -> Solved:
    """Compute the matrices of each chunk that do not depend on the state, and convert the queries and keys.

    A warpgroup computes one chunk of a value head after the other. It has much to wait for, mostly products, during
    which the other warpgroups of its multiprocessor compute.

    Args:
        q, k: [B, T, K, D]; TMA reads zeros beyond the end.
        gates: see `TOTAL`.
        first: for each token the first one of its chunk that it sees; None if it sees all earlier ones.
        scale: factor of the queries.
        with_beta: True to multiply the columns of `solved` by beta, which saves the recurrence from multiplying v.
        programs: programs that run at a time, one on each multiprocessor.
        interpret: True to interpret the kernel on a CPU.
    """
    width = k.shape[3]
    if not interpret:
        speed_up_lowering()
    groups = 1 if interpret else _SOLVERS
    square = jax.ShapeDtypeStruct((*gates.shape[:3], CHUNK, CHUNK), FINE)
    matrix = tiled_smem((groups, CHUNK, CHUNK), FINE)
    token_rows = tiled_smem((groups, CHUNK, width), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_solve_body, scale, first is not None, interpret),
        kernel_name="delta_rule_solve",
        out_type=(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)), square, square),
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=_SolveBuffers(
            q=token_rows,
            k=token_rows,
            gates=plgpu.SMEM((groups, GATES, CHUNK), jnp.float32),
            first=None if first is None else plgpu.SMEM((groups, CHUNK), jnp.int32),
            beta=plgpu.SMEM((groups, CHUNK), jnp.float32) if with_beta else None,
            below=matrix,
            inverse=matrix,
            inside=matrix,
            full=plgpu.Barrier(num_arrivals=3 + (first is not None) + with_beta, num_barriers=groups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    fine_q, fine_k, solved, inside = kernel(q, k, gates, *([] if first is None else [first]))
    # The kernel stores float16 where the inputs were, so that it needs no more shared memory.
    fine_q, fine_k = (lax.bitcast_convert_type(x, FINE) for x in (fine_q, fine_k))
    return Solved(fine_q, fine_k, solved, inside)


def _solve_body(scale: float, packed: bool, interpret: bool, q: Ref, k: Ref, gates: Ref, *refs: Ref) -> None:
    fine_q, fine_k, solved, inside, *memory = refs[packed:]
    arrays = _SolveArrays(q, k, gates, refs[0] if packed else None, fine_q, fine_k, solved, inside)
    warpgroup = lax.axis_index("warpgroup")
    own: Any = (None if ref is None else ref.at[warpgroup] for ref in memory)
    buffers = _SolveBuffers(*own)
    batch, heads, chunks = gates.shape[:3]
    start = lax.axis_index("program") * lax.axis_size("warpgroup") + warpgroup
    stride = lax.axis_size("program") * lax.axis_size("warpgroup")
    count = lax.div(batch * heads * chunks - start + stride - 1, stride)

    def item(number: Index) -> tuple[Index, Index, Index]:
        """Return batch entry, head and chunk; heads that share their keys are computed at the same time."""
        index = start + number * stride
        row = lax.div(index, heads)
        return lax.div(row, chunks), lax.rem(index, heads), lax.rem(row, chunks)

    def load(number: Index) -> None:
        pl.when(number < count)(lambda: _load_unsolved(arrays, buffers, item(number)))

    def load_beta(number: Index) -> None:
        if buffers.beta is not None:
            source = gates.at[(*item(number), BETA)]
            pl.when(number < count)(lambda: plgpu.copy_gmem_to_smem(source, buffers.beta, buffers.full))

    def step(number: Index, _: None) -> None:
        _solve(scale, interpret, arrays, buffers, item(number), lambda: load(number + 1))
        load_beta(number + 1)

    load(jnp.int32(0))
    load_beta(jnp.int32(0))
    lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0)


def _load_unsolved(arrays: _SolveArrays, buffers: _SolveBuffers, place: tuple[Index, Index, Index]) -> None:
    batch, head, chunk = place
    part = batch, pl.ds(chunk * CHUNK, CHUNK), lax.div(head, arrays.gates.shape[1] // arrays.k.shape[2])
    plgpu.copy_gmem_to_smem(arrays.k.at[part], buffers.k, buffers.full)
    plgpu.copy_gmem_to_smem(arrays.q.at[part], buffers.q, buffers.full)
    plgpu.copy_gmem_to_smem(arrays.gates.at[place], buffers.gates, buffers.full)
    if arrays.first is not None and buffers.first is not None:
        plgpu.copy_gmem_to_smem(arrays.first.at[batch, chunk], buffers.first, buffers.full)


def _solve(
    scale: float,
    interpret: bool,
    arrays: _SolveArrays,
    buffers: _SolveBuffers,
    place: tuple[Index, Index, Index],
    load_next: Callable[[], None],
) -> None:
    """Solve one chunk of a value head; `load_next` is called when the buffers of the inputs are free."""
    batch, head, chunk = place
    group = arrays.gates.shape[1] // arrays.k.shape[2]
    plgpu.barrier_wait(buffers.full)

    def score(left: Ref) -> jax.Array:
        return wgmma.multiply((CHUNK, CHUNK), lambda scores: scores.add(left, buffers.k.transpose((1, 0))))

    keys = score(buffers.k)
    # A zero, which the compiler does not know: it would keep the masks of all steps in registers from chunk to chunk.
    row = _row() + (chunk >> 30)
    visible = row >= _column()
    if buffers.first is not None:
        visible = visible & (_of_rows(buffers.first) <= _column())
    difference = _of_rows(buffers.gates.at[TOTAL]) - _of_columns(buffers.gates.at[TOTAL_AGAIN])
    decay = jnp.where(visible, jnp.exp(jnp.where(visible, difference, 0.0)), 0.0)
    below = jnp.where(row > _column(), keys * decay * _of_rows(buffers.gates.at[BETA]), 0.0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffers.inside[...] = (score(buffers.q) * (decay * scale)).astype(FINE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.inside, arrays.inside.at[place])

    @pl.when(lax.rem(head, group) == 0)
    def _():
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        for buffer, target in ((buffers.q, arrays.fine_q), (buffers.k, arrays.fine_k)):
            fine = plgpu.load(buffer, layout=plgpu.Layout.WGMMA).astype(jnp.float32).astype(FINE)
            buffer[...] = lax.bitcast_convert_type(fine, buffer.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, target.at[batch, tokens, lax.div(head, group)])

    def free_inputs() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        load_next()

    inverse = _inverse_of_unit_lower(below, row ^ _column(), buffers, free_inputs, interpret)
    if buffers.beta is not None:
        inverse = inverse * _of_columns(buffers.beta)
    buffers.inverse[...] = inverse.astype(FINE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.inverse, arrays.solved.at[place])


def _row() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0, layout=plgpu.Layout.WGMMA)


def _column() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1, layout=plgpu.Layout.WGMMA)


def _of_rows(ref: Ref) -> jax.Array:
    """Return a vector [C] as a matrix [C, C] that has its values in the rows."""
    return lax.broadcast_in_dim(wgmma.load_rows(ref), (CHUNK, CHUNK), [0])


def _of_columns(ref: Ref) -> jax.Array:
    return lax.broadcast_in_dim(wgmma.load_columns(ref), (CHUNK, CHUNK), [1])


def _inverse_of_unit_lower(
    below: jax.Array, distance: jax.Array, buffers: _SolveBuffers, meanwhile: Callable[[], None], interpret: bool
) -> jax.Array:
    """Return (I + A)^-1 for A below the diagonal, by inverting blocks on the diagonal of twice the size each time.

    See `xla._inverse_of_unit_lower`; here the whole of A is multiplied, and what lies outside of the blocks is dropped
    at the end. The highest bit of `distance`, the exclusive or of row and column, says in which step the two are
    joined. `meanwhile` is called in the middle.
    """
    inverse = jnp.where(distance == 0, 1.0, 0.0) - jnp.where(distance == 1, below, 0.0)
    buffers.below[...] = below.astype(FINE)
    block = 2
    while block < CHUNK:
        half = inverse.astype(FINE)
        buffers.inverse[...] = half
        plgpu.commit_smem()
        if 2 * block == _HALFWAY:
            meanwhile()
        product = _multiply(half, buffers.below, interpret)
        product = _multiply(product.astype(FINE), buffers.inverse, interpret)
        joined = (distance >= block) & (distance < 2 * block)
        inverse = inverse - jnp.where(joined, product, 0.0)
        block *= 2
    return inverse


def _multiply(left: jax.Array, right: Ref, interpret: bool) -> jax.Array:
    def multiply(product: Accumulator) -> jax.Array:
        product.add(left, right)
        return product.load()

    return wgmma.accumulate(multiply, (CHUNK, right.shape[1]), interpret=interpret)


# --- the recurrence ----------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    """Input arrays of the recurrence in global memory; `state` is the transpose [B, N, V, D]."""

    q: Ref
    k: Ref
    solved: Ref
    inside: Ref
    v: Ref
    gates: Ref
    state: Ref


class _Buffers(NamedTuple):
    """Shared memory and barriers of the recurrence; the leading dim counts stages, of `out` slices.

    There are several barriers for a stage because the compiler moves nothing past the loop of a wait. Without one
    between a product and the use of its result it would wait for the product before it starts the next one.
    """

    q: Ref
    k: Ref
    v: Ref
    solved: Ref
    inside: Ref
    gates: Ref
    out: Ref
    k_full: Ref
    q_full: Ref
    solved_full: Ref
    inside_full: Ref
    empty: Ref


def recur(
    config: RecurrenceConfig,
    chunks: Solved,
    v: Float[Array, "B T N V"],
    gates: Float[Array, "B N n 7 C"],
    state: Float[Array, "B N V D"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N V D"]]:
    """Compute the outputs, in the dtype of v, and the transpose of the state after the last chunk, float32.

    `chunks` are solved with beta.
    """
    batch, _, heads, value_width = v.shape
    width = chunks.k.shape[3]
    stages = config.stages
    square = tiled_smem((stages, CHUNK, CHUNK), FINE)
    token_rows = tiled_smem((stages, CHUNK, width), FINE)
    kernel = pipeline.launch(
        "delta_rule_recurrence",
        functools.partial(_recurrence_body, config),
        consumers=config.slices,
        interpret=config.interpret,
        out_type=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(value_width // (SLICE * config.slices), heads, batch, config.programs),
        grid_names=("part", "head", "batch", "program"),
        scratch_types=_Buffers(
            q=token_rows,
            k=token_rows,
            v=tiled_smem((stages, config.slices, CHUNK, SLICE), v.dtype),
            solved=square,
            inside=square,
            gates=plgpu.SMEM((stages, GATES, CHUNK), jnp.float32),
            out=tiled_smem((config.slices, CHUNK, SLICE), v.dtype),
            k_full=plgpu.Barrier(num_arrivals=2 + config.slices, num_barriers=stages),
            q_full=plgpu.Barrier(num_barriers=stages),
            solved_full=plgpu.Barrier(num_barriers=stages),
            inside_full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=config.slices, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # The threads of a warpgroup read nothing that others of it write, other than by TMA.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    return tuple(kernel(*chunks, v, gates, state))


class _Place(NamedTuple):
    """The head and the value columns that a program computes, its first own chunk, and the one after its last."""

    batch: Index
    head: Index
    part: Index
    begin: Index
    end: Index


def _recurrence_body(config: RecurrenceConfig, *refs: Ref) -> None:
    inputs = _Inputs(*refs[:7])
    out, last, *scratch = refs[7:]
    buffers = _Buffers(*scratch)
    own = replay.own_chunks(inputs.gates.shape[2], config.programs, _SHARE, lax.axis_index("program"))
    place = _Place(lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("part"), *own)
    pipeline.specialize(
        lax.axis_index("warpgroup"),
        config.slices,
        functools.partial(_recur, config, inputs, out, last, buffers, place),
        functools.partial(_load, config, inputs, buffers, place),
    )


def _load(config: RecurrenceConfig, inputs: _Inputs, buffers: _Buffers, place: _Place) -> None:
    """Load one chunk after the other, as the loading warpgroup."""
    key_head = lax.div(place.head, inputs.v.shape[2] // inputs.k.shape[2])

    def load_for_outputs(chunk: Index, slot: Index) -> None:
        queries = inputs.q.at[place.batch, pl.ds(chunk * CHUNK, CHUNK), key_head]
        plgpu.copy_gmem_to_smem(queries, buffers.q.at[slot], buffers.q_full.at[slot])
        inside = inputs.inside.at[place.batch, place.head, chunk]
        plgpu.copy_gmem_to_smem(inside, buffers.inside.at[slot], buffers.inside_full.at[slot])

    def load(chunk: Index, slot: Index, acquire: Callable[..., None]) -> None:
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        matrix = place.batch, place.head, chunk
        k_full = buffers.k_full.at[slot]
        acquire(buffers.empty)
        plgpu.copy_gmem_to_smem(inputs.k.at[place.batch, tokens, key_head], buffers.k.at[slot], k_full)
        plgpu.copy_gmem_to_smem(inputs.gates.at[matrix], buffers.gates.at[slot], k_full)
        for index in range(config.slices):
            columns = pl.ds((place.part * config.slices + index) * SLICE, SLICE)
            values = inputs.v.at[place.batch, tokens, place.head, columns]
            plgpu.copy_gmem_to_smem(values, buffers.v.at[slot, index], k_full)
        plgpu.copy_gmem_to_smem(inputs.solved.at[matrix], buffers.solved.at[slot], buffers.solved_full.at[slot])
        if config.programs == 1:
            load_for_outputs(chunk, slot)
        else:
            pl.when(chunk >= place.begin)(lambda: load_for_outputs(chunk, slot))

    config.ring.produce(0, place.end, load)
    config.ring.drain(place.end, buffers.empty)


def _recur(config: RecurrenceConfig, inputs: _Inputs, out: Ref, last: Ref, buffers: _Buffers, place: _Place) -> None:
    """Compute the outputs and the last state of 64 value columns, as a computing warpgroup."""
    chunks = inputs.gates.shape[2]
    index = lax.axis_index("warpgroup")
    columns = pl.ds((place.part * config.slices + index) * SLICE, SLICE)
    own = place.batch, place.head, columns

    staging = buffers.out.at[index]

    def store(chunk: Index, result: jax.Array) -> None:
        """Store the outputs of a chunk, transposed in registers, through shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(staging, result)
        plgpu.commit_smem()

        @pl.when(chunk >= place.begin)
        def _():
            plgpu.copy_smem_to_gmem(staging, out.at[place.batch, pl.ds(chunk * CHUNK, CHUNK), place.head, columns])

    def repeat(chunk: Index, state: jax.Array) -> jax.Array:
        slot = config.ring.slot(chunk)
        state = next_state(config, buffers, slot, state, with_beta=True)
        config.ring.release(slot, buffers.empty)
        return state

    def step(chunk: Index, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, before = carry
        slot = config.ring.slot(chunk)
        # The outputs are stored one chunk later, while the tensor cores multiply.
        result, state = _next_chunk(config, buffers, slot, state, lambda: store(chunk - 1, before))
        config.ring.release(slot, buffers.empty)
        return state, result

    state = plgpu.load(inputs.state.at[own], layout=plgpu.Layout.WGMMA, optimized=False)
    if config.programs > 1:
        state = lax.fori_loop(0, place.begin, repeat, state)
    nothing = wgmma.zeros(SLICE, CHUNK).astype(out.dtype)
    state, result = lax.fori_loop(place.begin, place.end, step, (state, nothing))
    store(jnp.int32(place.end - 1), result)

    @pl.when(place.end == chunks)
    def _():
        last.at[own][...] = state

    plgpu.wait_smem_to_gmem(0)


def _next_chunk(
    config: RecurrenceConfig, buffers: _Buffers, slot: Index, state: jax.Array, meanwhile: Callable[[], None]
) -> tuple[jax.Array, jax.Array]:
    """Return a chunk's outputs [64, C] and the state after it [64, D], transposed, of this warpgroup's columns.

    `meanwhile` is called while the tensor cores multiply.
    """
    k = buffers.k.at[slot]
    gates = buffers.gates.at[slot]
    square = SLICE, CHUNK

    def read(found: Accumulator, out: Accumulator) -> tuple[jax.Array, jax.Array, jax.Array]:
        left = state.astype(FINE)
        found.add(left, k.transpose((1, 0)))
        out.add(left, buffers.q.at[slot].transpose((1, 0)))
        meanwhile()
        values = load_transposed(buffers.v.at[slot, lax.axis_index("warpgroup")])
        plgpu.barrier_wait(buffers.solved_full.at[slot])
        missing = values + of_tokens(gates.at[FADED]) * found.load(pending=1)

        def solve(new: Accumulator) -> tuple[jax.Array, jax.Array, jax.Array]:
            new.add(missing.astype(FINE), buffers.solved.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(buffers.inside_full.at[slot])
            result = out.load(pending=1) * (of_tokens(gates.at[GROWN]) * config.scale)
            kept = state * gates[GROWN, CHUNK - 1]
            return result, kept, new.load()

        return wgmma.accumulate(solve, square, interpret=config.interpret)

    plgpu.barrier_wait(buffers.k_full.at[slot])
    plgpu.barrier_wait(buffers.q_full.at[slot])
    out, kept, new = wgmma.accumulate(read, square, square, interpret=config.interpret)

    def write(out: Accumulator, state: Accumulator) -> tuple[jax.Array, jax.Array]:
        out.add(new.astype(FINE), buffers.inside.at[slot].transpose((1, 0)))
        state.add((new * of_tokens(gates.at[REST])).astype(FINE), k)
        return out.load(pending=1).astype(buffers.out.dtype), state.load()

    return wgmma.accumulate(write, out, kept, interpret=config.interpret)
