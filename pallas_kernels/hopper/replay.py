"""Division of a recurrence over chunks among programs, each of which repeats the states before its own chunks.

A recurrence of few heads leaves multiprocessors idle, and its outputs take more work than its states. So several
programs compute one recurrence: each computes the states alone of all chunks before its own, then the outputs of its
own. No program waits for another, and the results are those of one program, to the last bit. The later a program's
chunks begin, the fewer they are, so that all programs take as long.

The alternative is an affine map (M, b) of each part of the sequence, and a second pass from the states that they give.
With r the work of a state relative to that of a state and its outputs, replay takes r / (1 - (1 - r)^n) of the time of
one program. A delta rule's M has D x D numbers, which take as many products as its state (r = 5 / 8), so that n parts
take (2 r (n - 1) / n + 1) / n: with two 0.81 against 0.73, with four 0.48 against 0.64, for which only calls of 16
heads or fewer have room. Where M is a number, as in SSD (r = 2 / 7), two parts take 0.57 against 0.58, four 0.30
against 0.39, with another kernel and states in global memory.
"""

import jax.numpy as jnp

from pallas_kernels.mosaic_api import Index
from pallas_kernels.target import multiprocessors

_MOST = 4
"""Programs of a recurrence; more than these take little time off."""
_FEWEST_CHUNKS = 16
"""Chunks of a recurrence for each of its programs."""


def count_programs(recurrences: int, chunks: int) -> int:
    """Return how many programs should compute each of `recurrences` independent recurrences of so many chunks."""
    return max(1, min(multiprocessors() // recurrences, chunks // _FEWEST_CHUNKS, _MOST))


def first_chunks(chunks: int, programs: int, share: float) -> tuple[int, ...]:
    """Return the first own chunk of each program, and `chunks` at the end.

    Args:
        chunks: Chunks of the recurrence.
        programs: Programs that compute it.
        share: Work of the state of a chunk, relative to that of its state and its outputs.
    """
    before = [1 - (1 - share) ** index for index in range(programs + 1)]
    return tuple(round(chunks * part / before[-1]) for part in before)


def own_chunks(chunks: int, programs: int, share: float, program: Index) -> tuple[Index, Index]:
    """Return the first own chunk of a program, and the one after its last. Traceable; arguments as above."""
    if programs == 1:
        return 0, chunks
    firsts = first_chunks(chunks, programs, share)
    begin: Index = jnp.int32(0)
    end: Index = jnp.int32(firsts[1])
    for index in range(1, programs):
        begin = jnp.where(program == index, firsts[index], begin)
        end = jnp.where(program == index, firsts[index + 1], end)
    return begin, end
