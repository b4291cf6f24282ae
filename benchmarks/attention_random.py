"""Attention of shapes drawn at random, ours and cuDNN's: called by `python benchmarks/attention.py --random 20`.

Nobody tuned block sizes for these shapes. Programs are compiled side by side, in processes of their own; measurements
take turns through a lock on a file, so that one process at a time uses the GPU. Within a shape the two implementations
take turns too.
"""

import contextlib
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention import TURNS, Work, cudnn_with_mask, jax_arrays, ours
from benchmarks.timing import median_seconds

PARTS = {"forward": 1.0, "both": 3.5}
"""Measured part -> its FLOPs, relative to the forward's."""
HEAD_DIMS, HEAD_DIM_SHARES = (64, 96, 128, 192, 256), (0.3, 0.05, 0.4, 0.1, 0.15)
GROUPS, GROUP_SHARES = (1, 2, 4, 6, 8), (0.25, 0.15, 0.3, 0.15, 0.15)
KINDS, KIND_SHARES = ("causal", "full", "window", "documents"), (0.55, 0.15, 0.15, 0.15)
LENGTHS, RAGGED_SHARE = (1024, 2048, 4096, 8192, 16384), 0.4
LONGEST_PACKED = 8192
"""cuDNN computes packed documents with a dense mask, whose bytes grow with the square of the length."""
LOCK = Path(tempfile.gettempdir()) / "jaxstack-attention-benchmark.lock"


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


def programs(work: Work) -> dict[str, dict[str, Callable]]:
    """Compile forward, and forward and backward, of ours and of cuDNN's; a string instead says why there is none."""
    import jax
    import jax.numpy as jnp

    ids = work.segment_ids()
    ids = None if ids is None else jnp.asarray(ids)
    attentions = {
        "ours": ours("mosaic", work, ids),
        "cudnn": ours("cudnn", work, ids) if ids is None else cudnn_with_mask(work, ids),
    }
    arrays = jax_arrays(work)
    found: dict[str, Any] = {}
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


def _gradients(attention: Callable, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    import jax

    return jax.vjp(attention, q, k, v)[1](d_out)


@contextlib.contextmanager
def only_user_of_the_gpu() -> Iterator[None]:
    """Hold the lock that all processes of this benchmark on this machine take before they measure."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_work(work: Work) -> dict[str, Any]:
    """Measure one shape.

    Returns:
        Seconds as {"ours": {"forward": s, "both": s}, "cudnn": ...}, or a string that says why there are none; and
        `difference`, the largest relative difference of our results from cuDNN's, if both ran.
    """
    import jax

    compiled = programs(work)
    found: dict[str, Any] = {name: runs for name, runs in compiled.items() if isinstance(runs, str)}
    runs = {name: made for name, made in compiled.items() if name not in found}
    samples: dict[tuple[str, str], list[float]] = {}
    with only_user_of_the_gpu():
        results = {name: [made["forward"](), *made["both"]()] for name, made in runs.items()}
        if len(results) == 2:
            found["difference"] = max(map(_relative_difference, results["ours"], results["cudnn"]))
        del results
        for _ in range(TURNS):
            for name, made in runs.items():
                for part, run in made.items():
                    taken = median_seconds(run, jax.block_until_ready, block_seconds=0.02)
                    samples.setdefault((name, part), []).append(taken)
    for name in runs:
        found[name] = {part: statistics.median(samples[name, part]) for part in PARTS}
    return found


def _relative_difference(x: Any, y: Any) -> float:
    import jax.numpy as jnp

    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


def measure_places(works: list[Work], places: list[int]) -> None:
    """Measure the shapes at these places of the list, and print one JSON line for each: what a child process does."""
    for place in places:
        print(json.dumps({"place": place, **time_work(works[place])}), flush=True)


def measure_random(count: int, seed: int, processes: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Draw and measure shapes in child processes; yield each shape with what `time_work` returns, in drawn order."""
    works = draw_works(count, seed)
    processes = min(processes, count)

    def run(first: int) -> list[dict[str, Any]]:
        places = ",".join(str(place) for place in range(first, count, processes))
        command = [sys.executable, str(Path(__file__).with_name("attention.py")), "--random", str(count)]
        command += ["--seed", str(seed), "--places", places]
        found = []
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            for line in child.stdout or ():
                if line.startswith("{"):
                    found.append(json.loads(line))
                    print(f"{works[found[-1]['place']]}: {line.strip()}", flush=True)
            if child.wait():
                errors.seek(0)
                print(f"places {places}: {(errors.read().strip().splitlines() or ['no message'])[-1]}", flush=True)
        return found

    with ThreadPoolExecutor(processes) as pool:
        found = {line.pop("place"): line for lines in pool.map(run, range(processes)) for line in lines}
    for place, work in enumerate(works):
        yield work, found.get(place, {"ours": "the process failed"})


def row_of(work: Work, result: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    """Return the result row of one shape: milliseconds and TFLOP/s of both, and ratios (above 1 if ours is faster)."""
    row: dict[str, Any] = {
        "work": f"attention random {work}", "implementation": "jaxstack mosaic", "seed": seed, "device": device,
        "difference": result.get("difference"),
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


def run_random(count: int, seed: int, processes: int | None, places: str) -> None:
    """Measure shapes drawn with `seed`, print a table and append its rows; with `places`, only those of a child."""
    if places:
        measure_places(draw_works(count, seed), [int(place) for place in places.split(",")])
        return
    import jax

    from benchmarks.rows import append_rows, print_table, require_commit

    require_commit("attention_random")
    found = list(measure_random(count, seed, processes or os.cpu_count() or 1))
    device = jax.devices()[0].device_kind
    rows = [row_of(work, result, seed, device) for work, result in found]
    numbers = ("ours_forward_tflops", "cudnn_forward_tflops", "forward_ratio")
    numbers += ("ours_both_tflops", "cudnn_both_tflops", "both_ratio", "difference")
    print_table(rows, ("work", *numbers))
    for row in rows:
        for name in ("ours", "cudnn"):
            if reason := row.get(f"{name}_error"):
                print(f"{row['work']}: {name}: {reason}")
    append_rows("attention_random", rows)
