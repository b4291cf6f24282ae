"""Attention on random shapes: our kernels and cuDNN's; run by `python benchmarks/attention/attention.py --random 20`.

Block sizes were not tuned for these shapes. Several processes compile the programs at the same time. When all are
compiled, the shapes are measured one after the other: compilers would delay the launches of kernels, and other work on
the GPU the kernels themselves. Within a shape the two implementations take turns.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention.attention import TURNS, Work, cudnn_with_mask, jax_arrays, ours
from benchmarks.timing import median_seconds

PARTS = {"forward": 1.0, "both": 3.5}
"""Measured part -> its FLOPs, relative to the forward's."""
HEAD_DIMS = (64, 96, 128, 192, 256)
HEAD_DIM_SHARES = (0.3, 0.05, 0.4, 0.1, 0.15)
GROUPS = (1, 2, 4, 6, 8)
GROUP_SHARES = (0.25, 0.15, 0.3, 0.15, 0.15)
KINDS = ("causal", "full", "window", "documents")
KIND_SHARES = (0.55, 0.15, 0.15, 0.15)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
RAGGED_SHARE = 0.4
LONGEST_PACKED = 8192
"""cuDNN computes packed documents with a dense mask, whose bytes grow with the square of the length."""
COMPILED = "compiled"
"""Line that a child process prints when it is ready to measure."""


def draw_works(count: int, seed: int) -> list[Work]:
    """Draw different shapes of attention as models have them; the same seed gives the same shapes.

    Head dims, query heads for each key head, lengths (powers of two, or any multiple of 8 from 1024 to 12,280) and
    masks are drawn independently; the batch fills 8192 or 16,384 tokens.
    """
    rng = np.random.default_rng(seed)
    works: list[Work] = []
    while len(works) < count:
        head_dim = int(rng.choice(HEAD_DIMS, p=HEAD_DIM_SHARES))
        group = int(rng.choice(GROUPS, p=GROUP_SHARES))
        kv_heads = int(rng.choice([n for n in (1, 2, 4, 8, 16, 32) if 8 <= n * group <= min(48, 6144 // head_dim)]))
        ragged = rng.random() < RAGGED_SHARE
        length = int(8 * rng.integers(128, 1536) if ragged else rng.choice(LENGTHS))
        kind = str(rng.choice(KINDS, p=KIND_SHARES))
        if kind == "documents":
            length = min(length, LONGEST_PACKED)
        batch = max(1, round(int(rng.choice([8192, 16384])) / length))
        rules: dict[str, Any] = {
            "causal": {},
            "full": {"causal": False},
            "window": {"window": int(rng.choice([512, 1024, 4096]))},
            "documents": {"documents": int(rng.integers(2, 17))},
        }[kind]
        work = Work(batch, length, group * kv_heads, kv_heads, head_dim, **rules)
        if work not in works and (work.window or 0) < length:
            works.append(work)
    return works


def compile_programs(work: Work) -> dict[str, Any]:
    """Compile the forward, and forward and backward, of our kernels and cuDNN's; a string says why that failed.

    `default` is the name of the backend that `flash_attention` chooses if `implementation` is not given.
    """
    import jax
    import jax.numpy as jnp

    ids = work.segment_ids()
    ids = None if ids is None else jnp.asarray(ids)
    attentions = {
        "ours": ours("mosaic", work, ids),
        "cudnn": ours("cudnn", work, ids) if ids is None else cudnn_with_mask(work, ids),
    }
    arrays = jax_arrays(work)
    found: dict[str, Any] = {"default": default_backend(work, arrays[:3], ids)}
    for name, attention in attentions.items():
        try:
            found[name] = {
                "forward": functools.partial(jax.jit(attention).lower(*arrays[:3]).compile(), *arrays[:3]),
                "both": functools.partial(
                    jax.jit(functools.partial(_gradients, attention)).lower(*arrays).compile(), *arrays
                ),
            }
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return found


def default_backend(work: Work, arrays: Sequence[Any], ids: Any) -> str:
    """Return the name of the backend that `flash_attention` chooses by default for q, k and v of these shapes."""
    import jax

    from pallas_kernels import record_choices

    with record_choices() as choices:
        jax.eval_shape(ours(None, work, ids), *arrays)
    return choices[0].backend


def _gradients(attention: Callable, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    import jax

    return jax.vjp(attention, q, k, v)[1](d_out)


def time_programs(compiled: dict[str, Any]) -> dict[str, Any]:
    """Measure the programs of one shape, made by `compile_programs`.

    Returns:
        Seconds as {"ours": {"forward": s, "both": s}, "cudnn": ...}, or a string that says why there are none;
        `default`, as `compile_programs` gives it; and `difference`, the largest relative difference of our results
        from cuDNN's, if both ran.
    """
    import jax

    found: dict[str, Any] = {name: runs for name, runs in compiled.items() if isinstance(runs, str)}
    runs = {name: made for name, made in compiled.items() if name not in found}
    samples: dict[tuple[str, str], list[float]] = {}
    results = {name: [made["forward"](), *made["both"]()] for name, made in runs.items()}
    if len(results) == 2:
        found["difference"] = max(map(_relative_difference, results["ours"], results["cudnn"]))
    del results
    for turn in range(TURNS):
        # The order of the implementations affects the GPU's clock, so it alternates.
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            for part, run in runs[name].items():
                taken = median_seconds(run, jax.block_until_ready, block_seconds=0.02)
                samples.setdefault((name, part), []).append(taken)
    for name in runs:
        found[name] = {part: statistics.median(samples[name, part]) for part in PARTS}
    return found


def _relative_difference(x: Any, y: Any) -> float:
    import jax.numpy as jnp

    x = x.astype(jnp.float32)
    y = y.astype(jnp.float32)
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


def serve_requests(works: list[Work], indices: list[int], requests: Iterable[str]) -> None:
    """Compile shapes, then measure each when it is requested: the work of a child process.

    Args:
        works: Drawn shapes.
        indices: Indices in `works` of the shapes that this process is responsible for.
        requests: Lines with one of the indices each; a line of JSON on standard output answers each.
    """
    compiled = {index: compile_programs(works[index]) for index in indices}
    print(COMPILED, flush=True)
    for index in map(int, requests):
        print(json.dumps(time_programs(compiled.pop(index))), flush=True)


class Child:
    """Process that compiles shapes and then measures them one at a time.

    Args:
        arguments: Command line of this benchmark.
        indices: Indices of its shapes in the list of drawn shapes.
    """

    def __init__(self, arguments: list[str], indices: list[int]) -> None:
        script = str(Path(__file__).with_name("attention.py"))
        command = [sys.executable, script, *arguments, "--indices", ",".join(map(str, indices))]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def wait_until_compiled(self) -> None:
        """Wait until the process has compiled all its shapes, or has died."""
        while (line := self._line()) and line.strip() != COMPILED:
            pass

    def measure(self, index: int) -> dict[str, Any]:
        """Return what `time_programs` returns for one shape, or the last line of the process's errors."""
        with contextlib.suppress(BrokenPipeError):
            print(index, file=self._process.stdin, flush=True)
        line = self._line()
        while line and not line.startswith("{"):
            line = self._line()
        return json.loads(line) if line else {"ours": self._last_error()}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _line(self) -> str:
        return self._process.stdout.readline() if self._process.stdout else ""

    def _last_error(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no message"])[-1][:200]


def measure_random(count: int, seed: int, processes: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Draw and measure shapes in child processes; yield each with what `time_programs` returns, in drawn order."""
    processes = min(processes, count)
    arguments = ["--random", str(count), "--seed", str(seed)]
    children = [Child(arguments, list(range(first, count, processes))) for first in range(processes)]
    try:
        for child in children:
            child.wait_until_compiled()
        for index, work in enumerate(draw_works(count, seed)):
            result = children[index % processes].measure(index)
            print(f"{work}: {result}", flush=True)
            yield work, result
    finally:
        for child in children:
            child.close()


def row_of(work: Work, result: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    """Return the result row of one shape.

    It has milliseconds and TFLOP/s of both, ratios (above 1 if ours is faster), and the default backend.
    """
    row: dict[str, Any] = {
        "work": f"attention random {work}", "implementation": "jaxstack mosaic", "seed": seed, "device": device,
        "default": result.get("default"), "difference": result.get("difference"),
    }  # fmt: skip
    for name in ("ours", "cudnn"):
        seconds = result.get(name, "not measured")
        if isinstance(seconds, str):
            row[f"{name}_error"] = seconds
            continue
        for part, factor in PARTS.items():
            row[f"{name}_{part}_milliseconds"] = 1e3 * seconds[part]
            row[f"{name}_{part}_tflops"] = factor * work.flops() / seconds[part] / 1e12
    for part in PARTS:
        mine, theirs = (row.get(f"{name}_{part}_milliseconds") for name in ("ours", "cudnn"))
        row[f"{part}_ratio"] = theirs / mine if mine and theirs else None
    return row


def run_random(count: int, seed: int, processes: int | None, indices: str) -> None:
    """Measure shapes drawn with `seed`, print a table and append its rows; with `indices`, only those of a child."""
    if indices:
        serve_requests(draw_works(count, seed), [int(index) for index in indices.split(",")], sys.stdin)
        return
    import jax

    from benchmarks.rows import append_rows, print_table, require_commit

    require_commit("attention_random")
    found = list(measure_random(count, seed, processes or os.cpu_count() or 1))
    device = jax.devices()[0].device_kind
    rows = [row_of(work, result, seed, device) for work, result in found]
    numbers = ("ours_forward_tflops", "cudnn_forward_tflops", "forward_ratio")
    numbers += ("ours_both_tflops", "cudnn_both_tflops", "both_ratio", "default", "difference")
    print_table(rows, ("work", *numbers))
    for row in rows:
        for name in ("ours", "cudnn"):
            if reason := row.get(f"{name}_error"):
                print(f"{row['work']}: {name}: {reason}")
    append_rows("attention_random", rows)
