"""Search for the fastest block sizes of the Hopper attention kernels, one kernel after the other.

Dims: B batch, T length of queries and keys, N query heads, K kv heads, H head dim.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import mosaic
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.request import AttentionRequest, Options, Segments
from pallas_kernels.attention.scores import row_delta
from pallas_kernels.attention.tilings import RUNS_WITH, Tiling, blocks_of, kernels, mask_kind, with_blocks
from pallas_kernels.target import current_target

_LARGEST_DIFFERENCE = 0.02
"""Roundings to bfloat16 in another order differ by less, a race or a forgotten tile by more."""

Measure = Callable[[str, Tiling], float]
"""Returns the seconds of a kernel with a tiling; raises an exception if it cannot be compiled or run."""


@dataclass(frozen=True)
class Work:
    """Shape and mask of the attention call to tune for; `documents` is how many are packed into each sequence."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask = Mask()
    documents: int | None = None

    @property
    def kind(self) -> str:
        """Name of the mask's kind in the tables of block sizes: "packed", "causal", "full" or "windowed"."""
        return mask_kind(self.mask, self.documents is not None)

    def __str__(self) -> str:
        return f"{self.batch}, {self.length}, {self.heads}/{self.kv_heads}, {self.head_dim} {self.kind} bfloat16"

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return normally distributed bfloat16 inputs to measure with: q [B, T, N, H], k and v [B, T, K, H]."""
        keys = jax.random.split(jax.random.key(0), 3)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        shapes = [(self.batch, self.length, n, self.head_dim) for n in heads]
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        return q, k, v

    def segments(self) -> Segments | None:
        """Return segment ids of packed documents of random lengths; None if no documents are packed."""
        if self.documents is None:
            return None
        rng = np.random.default_rng(0)
        ends = [rng.choice(np.arange(1, self.length), self.documents - 1, replace=False) for _ in range(self.batch)]
        starts = np.zeros((self.batch, self.length), np.int32)
        for row, places in zip(starts, ends, strict=True):
            row[places] = 1
        ids = jnp.asarray(starts.cumsum(axis=1), jnp.int32)
        return Segments(ids, ids)

    def request(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None) -> AttentionRequest:
        """Return the checked arguments of an attention call on these arrays, with the default scale."""
        options = Options(self.mask, self.head_dim**-0.5)
        return AttentionRequest(q, k, v, segments, options, False, current_target())

    def unsupported_reason(self) -> str | None:
        """Return why the Hopper kernels cannot compute a call of this shape on this machine, or None."""
        reasons = []

        def ask(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
            reasons.append(mosaic.unsupported_reason(self.request(q, k, v, None)))

        jax.eval_shape(ask, *jax.eval_shape(self.arrays))
        return reasons[0]


def candidates(kernel: str, start: Tiling) -> list[Tiling]:
    """Return the block sizes to try for one kernel: `start`, then all others, those that differ least from it first."""
    values = kernels()[kernel]
    start = dataclasses.replace(start, **RUNS_WITH.get(kernel, {}))
    found = [start]
    unused = _is_unused(blocks_of(start, kernel))
    for combination in itertools.product(*values.values()):
        blocks = dict(zip(values, combination, strict=True))
        if _is_unused(blocks):
            # The other blocks of a kernel that does not run mean nothing: one candidate is enough.
            if unused:
                continue
            unused = True
        tiling = with_blocks(start, kernel, blocks)
        if tiling not in found:
            found.append(tiling)

    def changes(tiling: Tiling) -> int:
        blocks = blocks_of(tiling, kernel)
        return sum(blocks[name] != value for name, value in blocks_of(start, kernel).items())

    return sorted(found, key=changes)


def _is_unused(blocks: Mapping[str, int | bool]) -> bool:
    """Return True if these block sizes turn their kernel off: one of them is zero."""
    return any(size == 0 and not isinstance(size, bool) for size in blocks.values())


def kernels_in_tuning_order() -> list[str]:
    """Return the kernels' names in tuning order: separate backward kernels before the fused one."""
    return sorted(kernels(), key=lambda kernel: kernel not in RUNS_WITH)


class Limit:
    """Time budget of a tuning run of `parts` parts: as each part starts, it gets an equal share of the time left."""

    def __init__(self, minutes: float | None, parts: int):
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._parts = parts

    def next_part(self) -> float:
        """Start the next part of the run and return its deadline, in seconds of `time.monotonic`."""
        now = time.monotonic()
        end = now + (self._end - now) / max(self._parts, 1)
        self._parts -= 1
        return end


def tune(
    work: Work,
    start: Tiling,
    measure: Measure,
    names: Sequence[str],
    limit: Limit,
    save: Callable[[str, dict[str, int | bool], str], None],
    report: Callable[[str], None] = print,
) -> int:
    """Find the fastest block sizes of each kernel in turn, keeping the best ones found for the kernels before it.

    Return how many of the kernels ran.

    Candidates that `measure` cannot run are skipped and reported; so are those that are left when time is out, which
    come in the order of how much they change (`candidates`).

    Args:
        work: Shape to tune for.
        start: Tiling to start from.
        measure: Measures one kernel with one tiling.
        names: Kernels to tune.
        limit: Time limit.
        save: Called as save(kernel, blocks, how they were measured, in words) whenever they are the fastest so far.
        report: Called with each line of progress.
    """
    best = start
    ran = 0
    for kernel in names:
        seconds: dict[Tiling, float] = {}
        tried = candidates(kernel, best)
        end = limit.next_part()
        for place, tiling in enumerate(tried):
            # The first shows what there is to gain.
            if place and time.monotonic() > end:
                report(f"{work}: {kernel}: time is out, {len(tried) - place} of {len(tried)} candidates not measured")
                break
            blocks = blocks_of(tiling, kernel)
            words = f"{work}: {kernel} {' '.join(f'{name} {value}' for name, value in blocks.items())}"
            try:
                seconds[tiling] = measure(kernel, tiling)
            except Exception as error:
                report(f"{words}: skipped, {_first_line(error)}")
                continue
            report(f"{words}: {1e3 * seconds[tiling]:.3f} ms")
            if seconds[tiling] == min(seconds.values()):
                best = with_blocks(best, kernel, blocks)
                save(kernel, blocks, f"{1e3 * seconds[tiling]:.3f} ms for {work}, jax {jax.__version__}")
        if seconds:
            ran += 1
            report(f"{work}: {kernel}: takes {blocks_of(best, kernel)}, {1e3 * min(seconds.values()):.3f} ms")
        else:
            report(f"{work}: {kernel}: none of {len(tried)} candidates runs, nothing is written")
    return ran


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


class Stopwatch:
    """Timer of an attention kernel with given block sizes, on this machine's GPU: the forward or the backward."""

    def __init__(self, work: Work):
        self._work = work
        self._arrays = work.arrays()
        self._segments = work.segments()
        self._rows: tuple[jax.Array, ...] | None = None
        self._expected: dict[bool, Any] = {}

    def __call__(self, kernel: str, tiling: Tiling) -> float:
        """Return the median seconds of one call of a kernel with these block sizes, and check its result.

        Raises:
            ValueError: The result differs from that of the tiling that was measured first.
            Exception: The compiler rejects the tiling.
        """
        function = self._attend
        arguments = self._arrays
        if kernel != "forward":
            rows = self._rows or jax.jit(functools.partial(self._rows_of_gradients, tiling))(*arguments)
            self._rows = rows
            function = self._differentiate
            arguments = (*arguments, *rows)
        compiled = jax.jit(functools.partial(function, tiling)).lower(*arguments).compile()
        self._compare(kernel == "forward", compiled(*arguments))
        return median_seconds(compiled, *arguments)

    def _attend(self, tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mosaic.attend(self._work.request(q, k, v, self._segments), tiling)

    def _rows_of_gradients(self, tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Return further inputs to measure the backward with: d_out (any numbers of its shape), lse and delta."""
        out, lse = self._attend(tiling, q, k, v)
        return q, lse, row_delta(out, q, jnp.zeros_like(lse))

    def _differentiate(self, tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> tuple:
        return mosaic.gradients(self._work.request(q, k, v, self._segments), *rows, tiling=tiling)

    def _compare(self, is_forward: bool, result: tuple[jax.Array, ...]) -> None:
        expected = self._expected.setdefault(is_forward, result)
        for x, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            x = x.astype(jnp.float32)
            wanted = wanted.astype(jnp.float32)
            error = float(jnp.linalg.norm(x - wanted) / jnp.linalg.norm(wanted))
            if not error <= _LARGEST_DIFFERENCE:
                raise ValueError(f"the result is wrong, it differs by {error:.2g} of its size from the first one's")


def median_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the median seconds of one call of a function, measured over batches of calls of about 20 ms."""
    result = jax.block_until_ready(function(*arguments))
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(2, min(100, int(0.02 / max(time.perf_counter() - begin, 1e-5))))
    samples = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples)
