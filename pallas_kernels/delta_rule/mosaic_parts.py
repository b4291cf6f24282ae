"""Parts that the Hopper kernels of the gated delta rule share: their constants, and the state from chunk to chunk.

Dims: C tokens of a chunk, D key width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, plgpu

CHUNK = ROWS
"""Tokens of a chunk: the rows of one tensor-core product."""
SLICE = ROWS
"""Value columns of the state that one warpgroup owns."""
TOTAL, TOTAL_AGAIN, BETA, READ, FADED, GROWN, REST = range(7)
"""Rows of `gates`: G, beta, -beta e^G, -e^G, e^G and e^(G_C - G).

The last four are 0 for tokens that the state does not meet: those of another document than the state before the chunk
or, for the last row, after it. G is there twice: jax 0.11 makes one load of two of the same array, which then has only
one layout. Two have a sign so that no product is negated: the compiler would do that before the product has ended, and
wait for it.
"""
GATES = 7
FINE = jnp.float16
"""Dtype of the operands of products. It rounds with three bits more than bfloat16.

So nearly all of the error of an output is that of its own rounding. Numbers of q and v must be less than 65504,
float16's largest, and lose bits below 1e-4; the small matrices have no entry of more than 2, as the rule with keys of
at most length 1 never makes a state longer.
"""


@dataclass(frozen=True)
class RecurrenceConfig:
    """Compile-time description of the recurrence over chunks.

    Attributes:
        scale: Factor of the queries.
        slices: Slices of 64 value columns that one program computes, one for each of its computing warpgroups. With
            one, a call of few heads uses more multiprocessors; with two, q, k and the small matrices are loaded once
            for both.
        stages: Chunks in flight from global memory.
        programs: Programs that compute a slice of the forward, see `pallas_kernels.hopper.replay`.
        interpret: True to interpret the kernel on a CPU.
    """

    scale: float
    slices: int = 1
    stages: int = 3
    programs: int = 1
    interpret: bool = False

    @property
    def ring(self) -> Ring:
        """Circular shared-memory buffer of chunks."""
        return Ring(self.stages, self.interpret)


def of_tokens(gate: Ref) -> jax.Array:
    """Return one number for each token, [C], as a matrix [64, C] that has them in its columns."""
    return lax.broadcast_in_dim(wgmma.load_columns(gate), (SLICE, CHUNK), [1])


def load_transposed(ref: Ref) -> jax.Array:
    """Return the transpose of [C, 64] in shared memory as float32, in the register layout of an accumulator."""
    return plgpu.load(ref.transpose((1, 0)), layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def store_transposed(ref: Ref, value: jax.Array) -> None:
    """Store [64, C], in the register layout of an accumulator, as its transpose [C, 64] in shared memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def next_state(
    config: RecurrenceConfig,
    buffers: Any,
    slot: Index,
    state: jax.Array,
    *,
    with_beta: bool,
    store_state: Callable[[], None] = lambda: None,
    store_new: Callable[[jax.Array], None] = lambda new: None,
) -> jax.Array:
    """Return the state after a chunk [64, D], transposed, of this warpgroup's columns.

    Args:
        config: of the recurrence.
        buffers: shared memory, with `k`, `v`, `solved`, `gates` and the barriers `k_full` and `solved_full`.
        slot: the chunk's place in it.
        state: before the chunk, [64, D].
        with_beta: True if the columns of `solved` are multiplied by beta.
        store_state, store_new: called while tensor cores multiply; `new` [64, C] is what the chunk's tokens add.
    """
    k = buffers.k.at[slot]
    gates = buffers.gates.at[slot]
    square = SLICE, CHUNK
    plgpu.barrier_wait(buffers.k_full.at[slot])

    def read(found: Accumulator) -> tuple[jax.Array, jax.Array]:
        found.add(state.astype(FINE), k.transpose((1, 0)))
        store_state()
        values = load_transposed(buffers.v.at[slot, lax.axis_index("warpgroup")])
        if not with_beta:
            values = of_tokens(gates.at[BETA]) * values
        plgpu.barrier_wait(buffers.solved_full.at[slot])
        missing = values + of_tokens(gates.at[FADED if with_beta else READ]) * found.load()

        def solve(new: Accumulator) -> tuple[jax.Array, jax.Array]:
            new.add(missing.astype(FINE), buffers.solved.at[slot].transpose((1, 0)))
            kept = state * gates[GROWN, CHUNK - 1]
            return kept, new.load()

        return wgmma.accumulate(solve, square, interpret=config.interpret)

    kept, new = wgmma.accumulate(read, square, interpret=config.interpret)

    def write(state: Accumulator) -> jax.Array:
        state.add((new * of_tokens(gates.at[REST])).astype(FINE), k)
        store_new(new)
        return state.load()

    return wgmma.accumulate(write, kept, interpret=config.interpret)
