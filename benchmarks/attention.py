"""Attention on one GPU: ours, cuDNN through jax, tokamax and torch, in turn: errors first, then TFLOP/s.

    python benchmarks/attention.py                 # everything, under four minutes on an H200
    python benchmarks/attention.py --only mosaic   # implementations whose name contains the word
    python benchmarks/attention.py --tune          # times our three kernels for several block sizes

FLOPs: 4 x visible pairs of query and key x heads x head dim forward, 2.5 times that backward. Rows are appended to
benchmarks/results/attention.jsonl.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

RESULTS = Path(__file__).parent / "results" / "attention.jsonl"
SECONDS = 225.0
START = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Work:
    """One shape; `documents` packs so many of uneven length into each sequence."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    documents: int | None = None

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        kind += f" window {self.window}" if self.window else ""
        kind += f" {self.documents} documents" if self.documents else ""
        return f"{self.batch}, {self.length}, {self.heads}/{self.kv_heads}, {self.head_dim} {kind} bf16"

    def segment_ids(self) -> np.ndarray | None:
        if self.documents is None:
            return None
        rng = np.random.default_rng(0)
        ends = np.sort(rng.choice(np.arange(1, self.length), (self.batch, self.documents - 1)), axis=1)
        return (np.arange(self.length)[None, :, None] >= ends[:, None, :]).sum(-1).astype(np.int32)

    def flops(self) -> float:
        """Of the forward."""
        total = 0.0
        ids = self.segment_ids()
        for row in range(self.batch):
            runs = [self.length] if ids is None else np.bincount(ids[row]).tolist()
            for run in runs:
                seen = np.arange(1, run + 1) if self.causal else np.full(run, run)
                if self.window:
                    seen = np.minimum(seen, self.window)
                # Causal counts half of the square by convention.
                total += run * run / 2 if self.causal and not self.window else float(seen.sum())
        return 4.0 * total * self.heads * self.head_dim


WORKS = (
    Work(4, 4096, 32, 8, 128),
    Work(1, 16384, 32, 8, 128),
    Work(4, 4096, 16, 16, 64),
    Work(2, 8192, 16, 16, 128, causal=False),
    Work(1, 16384, 32, 8, 128, documents=8),
    Work(1, 16384, 32, 8, 128, window=1024),
)


def measure(run: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """Median seconds of one call; calls are queued in batches of about 30 ms."""
    wait(run())
    begin = time.perf_counter()
    wait(run())
    calls = max(2, min(50, int(0.03 / max(time.perf_counter() - begin, 1e-5))))
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples)


# --- jax ----------------------------------------------------------------------------------------------------------


def jax_arrays(work: Work, seed: int = 0) -> list:
    import jax
    import jax.numpy as jnp

    heads = (work.heads, work.kv_heads, work.kv_heads, work.heads)
    keys = jax.random.split(jax.random.key(seed), 4)
    return [
        jax.random.normal(key, (work.batch, work.length, n, work.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def ours(implementation: str, work: Work, ids: Any, **options: Any) -> Callable:
    from pallas_kernels import flash_attention

    return functools.partial(
        flash_attention,
        causal=work.causal,
        window=work.window,
        segment_ids=ids,
        implementation=implementation,
        **options,
    )


def tokamax_attention(work: Work, ids: Any) -> Callable:
    import tokamax

    if ids is not None:
        raise NotImplementedError("no segment ids")
    options = {} if work.window is None else {"local_window_size": (work.window - 1, 0)}
    return lambda q, k, v: tokamax.dot_product_attention(
        q, k, v, is_causal=work.causal, implementation="mosaic", **options
    )


def cudnn_masked(work: Work, ids: Any) -> Callable:
    """What a user of jax can do for packed documents with cuDNN: a dense mask."""
    import jax

    mask = (ids[:, None, :, None] == ids[:, None, None, :]) if ids is not None else None
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=work.causal, implementation="cudnn"
    )


def jax_implementations(work: Work) -> dict[str, Callable]:
    """Name -> function of segment ids that makes the attention."""
    table = {
        "jaxstack mosaic": lambda ids: ours("mosaic", work, ids),
        "jaxstack xla": lambda ids: ours("xla", work, ids),
    }
    if work.documents is None:
        table["cudnn (jax)"] = lambda ids: ours("cudnn", work, ids)
    else:
        table["cudnn with a mask (jax)"] = lambda ids: cudnn_masked(work, ids)
    table["tokamax"] = lambda ids: tokamax_attention(work, ids)
    return table


def time_jax(work: Work, name: str, make: Callable) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    q, k, v, d_out = jax_arrays(work)
    ids = work.segment_ids()
    attention = make(None if ids is None else jnp.asarray(ids))
    forward = jax.jit(attention)
    both = jax.jit(lambda q, k, v, d_out: jax.vjp(attention, q, k, v)[1](d_out))
    first = measure(lambda: forward(q, k, v), jax.block_until_ready)
    return {"forward": first, "both": measure(lambda: both(q, k, v, d_out), jax.block_until_ready)}


# --- errors -------------------------------------------------------------------------------------------------------

CHECKS: tuple[tuple[Work, dict], ...] = (
    (Work(2, 1024, 8, 2, 128), {}),
    (Work(2, 1000, 4, 4, 64), {}),
    (Work(2, 1024, 4, 2, 128, causal=False), {}),
    (Work(2, 1000, 4, 2, 128, window=200), {}),
    (Work(2, 1024, 4, 2, 128, documents=5), {}),
    (Work(2, 1024, 4, 2, 64, documents=5, window=100), {"soft_cap": 5.0}),
    (Work(1, 512, 4, 2, 80), {}),
    (Work(1, 512, 4, 2, 96), {}),
    (Work(1, 512, 4, 2, 192), {}),
    (Work(1, 512, 4, 2, 256, documents=3), {}),
)


def results_of(attention: Callable, arrays: list, with_lse: bool) -> dict[str, np.ndarray]:
    """out, lse and gradients, with a cotangent for the log-sum-exp too."""
    import jax
    import jax.numpy as jnp

    q, k, v, d_out = arrays

    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        outputs, pullback = jax.vjp(attention, q, k, v)
        cotangent = (d_out.astype(q.dtype), jnp.sin(outputs[1])) if with_lse else d_out.astype(q.dtype)
        return outputs, pullback(cotangent)

    outputs, gradients = jax.jit(run)(q, k, v, d_out)
    outputs = outputs if with_lse else (outputs,)
    names = [*("out", "lse")[: len(outputs)], "d_q", "d_k", "d_v"]
    return {n: np.asarray(x, np.float32) for n, x in zip(names, (*outputs, *gradients), strict=True)}


def check_errors(only: str) -> set[str]:
    """Prints each backend's errors against float32; returns the names of those that fail."""
    import jax.numpy as jnp

    failed = set()
    for work, options in CHECKS:
        ids = work.segment_ids()
        ids = None if ids is None else jnp.asarray(ids)
        arrays = jax_arrays(work, seed=1)
        for name in ("mosaic", "xla", "cudnn"):
            if only not in f"jaxstack {name}" or (name == "cudnn" and (ids is not None or options)):
                continue
            if time.monotonic() - START > SECONDS / 2:
                print("   (no time for further checks)")
                return failed
            with_lse = name != "cudnn"
            try:
                truth = results_of(
                    ours("reference", work, ids, return_lse=with_lse, **options),
                    [x.astype(jnp.float32) for x in arrays],
                    with_lse,
                )
                plain = results_of(ours("xla_dense", work, ids, return_lse=with_lse, **options), arrays, with_lse)
                actual = results_of(ours(name, work, ids, return_lse=with_lse, **options), arrays, with_lse)
                ratios = {}
                for key, exact in truth.items():
                    error = np.linalg.norm(actual[key] - exact) / np.linalg.norm(exact)
                    allowed = np.linalg.norm(plain[key] - exact) / np.linalg.norm(exact)
                    ratios[key] = float(error / max(allowed, 1e-6))
                good = all(ratio <= 2.0 for ratio in ratios.values())
                words = " ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
            except Exception as error:
                good, words = False, f"{type(error).__name__}: {str(error)[:300]}"
            if not good:
                failed.add(name)
            print(
                f"{'ok  ' if good else 'FAIL'} {name:7s} {work} {options or ''}: error / plain bf16: {words}",
                flush=True,
            )
    return failed


# --- torch, in a process of its own -------------------------------------------------------------------------------


def torch_rows(only: str) -> None:
    """Prints one JSON line for each measurement."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn (torch)": SDPBackend.CUDNN_ATTENTION, "flash (torch)": SDPBackend.FLASH_ATTENTION}
    for work in WORKS:
        for name, backend in backends.items():
            if only not in name or work.window or work.documents:
                continue
            try:
                shape = (work.batch, work.heads, work.length, work.head_dim)
                kv_shape = (work.batch, work.kv_heads, work.length, work.head_dim)
                q, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                k, v = (torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                for x in (q, k, v):
                    x.requires_grad_()

                def attend(q=q, k=k, v=v, work=work, backend=backend):
                    with sdpa_kernel([backend]):
                        return torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=work.causal, enable_gqa=work.heads != work.kv_heads
                        )

                def both(attend=attend, inputs=(q, k, v), d_out=d_out):
                    return torch.autograd.grad(attend(), inputs, d_out)

                def wait(_):
                    torch.cuda.synchronize()

                with torch.no_grad():
                    forward = measure(attend, wait)
                row = {"forward": forward, "both": measure(both, wait)}
                print(json.dumps({"work": str(work), "name": f"{name} {torch.__version__}", **row}), flush=True)
            except Exception as error:
                print(json.dumps({"work": str(work), "name": name, "error": f"{error}"[:200]}), flush=True)


def run_torch(only: str, record: Callable) -> None:
    try:
        process = subprocess.run(
            [sys.executable, __file__, "--torch-rows", "--only", only], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        print("torch: took more than 60 s")
        return
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print("torch:", (process.stderr.strip().splitlines() or ["no rows"])[-1])
    works = {str(work): work for work in WORKS}
    for row in map(json.loads, lines):
        record(works[row["work"]], row["name"], row.get("error") or {k: row[k] for k in ("forward", "both")})


# --- our kernels one by one ---------------------------------------------------------------------------------------


def time_parts(work: Work, tiling: Any) -> dict[str, float]:
    """Milliseconds of our forward, dQ, and dK with dV kernels."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention import mosaic, mosaic_backward, mosaic_forward, tiles
    from pallas_kernels.attention.request import Mask, Options, Segments

    mask = Mask(work.causal, work.window)
    plan = mosaic._Plan(Options(mask, work.head_dim**-0.5), work.length, work.length, tiling, False)
    q, k, v, d_out = jax_arrays(work)
    ids = work.segment_ids()
    segments = None if ids is None else Segments(jnp.asarray(ids), jnp.asarray(ids))
    zeros = jnp.zeros((work.batch, work.heads, work.length), jnp.float32)
    residuals = mosaic_backward.Residuals(q, k, v, d_out, zeros + 5.0, zeros)
    parts = {}

    def add(name: str, config: Any, ranges: Any, kernel: Callable, *arguments: Any) -> None:
        try:
            function = jax.jit(functools.partial(kernel, config))
            table = ranges(mask, plan.blocks(config), segments)
            parts[name] = 1e3 * measure(lambda: function(*arguments, table, segments), jax.block_until_ready)
        except Exception as error:
            print(f"   {name}: {type(error).__name__}: {str(error)[:200]}")

    groups = tiling.forward_warpgroups
    forward = plan.config(64 * groups, tiling.forward_keys, tiling.forward_stages, groups)
    add("forward", forward, tiles.key_ranges, mosaic_forward.forward, q, k, v)
    query = plan.config(128, tiling.query_keys, tiling.query_stages)
    add("d_q", query, tiles.key_ranges, mosaic_backward.query_gradient, residuals)
    key = plan.config(tiling.key_queries, 128, tiling.key_stages)
    add("d_k, d_v", key, tiles.query_ranges, mosaic_backward.key_value_gradient, residuals)
    return parts


def tune() -> None:
    from pallas_kernels.attention.mosaic import Tiling

    candidates = {
        128: [Tiling(), Tiling(forward_keys=64, forward_stages=4, query_keys=128), Tiling(2, 64, 3, 64, 3, 64, 3),
              Tiling(2, 96, 2, 96, 2, 32, 4)],
        64: [Tiling(2, 128, 4, 128, 2, 64, 3), Tiling(3, 128, 3, 64, 4, 128, 2), Tiling(2, 192, 3, 128, 3, 64, 4),
             Tiling(3, 64, 4, 192, 2, 128, 3)],
    }  # fmt: skip
    for work in (WORKS[0], WORKS[2], WORKS[3], WORKS[4]):
        for tiling in candidates[work.head_dim]:
            if time.monotonic() - START > SECONDS:
                return
            parts = time_parts(work, tiling)
            words = " ".join(
                f"{name} {ms:.3f} ms ({factor * work.flops() / ms / 1e9:.0f} TFLOP/s)"
                for (name, ms), factor in zip(parts.items(), (1.0, 1.0, 1.5), strict=False)
            )
            print(f"{work} {dataclasses.astuple(tiling)}: {words}", flush=True)


# --- table --------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    import jax

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "device": jax.devices()[0].device_kind,
        "devices": 1,
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
        "commit": commit or "unknown",
        "command": "python " + " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def record_row(common: dict, work: Work, name: str, result: dict[str, float] | str) -> None:
    """Prints a line and appends a row; a string is the reason why there is no number."""
    if isinstance(result, str):
        print(f"  {name:28s} {result[:160]}", flush=True)
        return
    forward, both = (factor * work.flops() / result[key] / 1e12 for key, factor in (("forward", 1.0), ("both", 3.5)))
    print(
        f"  {name:28s} forward {forward:6.1f} TFLOP/s {1e3 * result['forward']:8.3f} ms   "
        f"forward+backward {both:6.1f} TFLOP/s {1e3 * result['both']:8.3f} ms",
        flush=True,
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        for part, tflops, seconds in (
            ("forward", forward, result["forward"]),
            ("forward+backward", both, result["both"]),
        ):
            row = {"work": f"attention {part} {work}", "implementation": name}
            row |= {"tflops_per_device": round(tflops, 1), "milliseconds": round(1e3 * seconds, 4)}
            file.write(json.dumps(row | common) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="implementations whose name contains this")
    parser.add_argument("--tune", action="store_true", help="time our kernels for several block sizes")
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    parser.add_argument("--torch-rows", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch_rows:
        torch_rows(arguments.only)
        return 0
    import jax

    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU and jax[cuda13]", file=sys.stderr)
        return 2
    if arguments.tune:
        tune()
        return 0
    failed = set() if arguments.skip_checks else check_errors(arguments.only)
    record = functools.partial(record_row, environment())
    for work in WORKS:
        print(work, flush=True)
        for name, make in jax_implementations(work).items():
            if arguments.only not in name:
                continue
            if time.monotonic() - START > SECONDS:
                print("  (out of time)")
                return 1
            try:
                record(work, name, time_jax(work, name, make))
            except Exception as error:
                message = str(error).strip().splitlines() or [traceback.format_exc(limit=1)]
                record(work, name, f"{type(error).__name__}: {message[0]}")
        if arguments.only in "jaxstack mosaic":
            from pallas_kernels.attention.mosaic import TILINGS

            try:
                print(
                    "   ours by kernel, ms:",
                    {k: round(ms, 3) for k, ms in time_parts(work, TILINGS[work.head_dim]).items()},
                )
            except Exception as error:
                print("   ours by kernel:", type(error).__name__, str(error)[:200])
    print("torch")
    run_torch(arguments.only, record)
    print("failed checks:", ", ".join(sorted(failed)) or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
