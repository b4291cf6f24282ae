"""Attention on one GPU: ours, cuDNN through jax, tokamax and torch, in turn: errors first, then TFLOP/s.

    python benchmarks/attention/attention.py                # everything, about five minutes on an H200
    python benchmarks/attention/attention.py --only mosaic  # implementations whose name contains the word
    python benchmarks/attention/attention.py --works 4096   # shapes whose name contains the word
    python benchmarks/attention/attention.py --random 20  # ours and cuDNN on random shapes (attention_random.py)

FLOPs: 4 x visible pairs of query and key x heads x head dim forward, 2.5 times that backward; a causal mask counts
half of the square. Each number is the median over three turns, in which every implementation of jax is measured once;
torch has a process of its own afterwards. tokamax and torch are measured where they are installed.
`python -m pallas_kernels.tune` finds our block sizes.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.timing import median_seconds

TURNS = 3


@dataclasses.dataclass(frozen=True)
class Work:
    """One shape; each sequence packs this number of documents of uneven length."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    documents: int | None = None
    value_dim: int | None = None
    sinks: bool = False

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        kind += f" window {self.window}" if self.window else ""
        kind += f" {self.documents} documents" if self.documents else ""
        kind += " sinks" if self.sinks else ""
        width = f"{self.head_dim}/{self.value_dim}" if self.value_dim else self.head_dim
        return f"{self.batch}, {self.length}, {self.heads}/{self.kv_heads}, {width} {kind} bf16"

    def segment_ids(self) -> np.ndarray | None:
        if self.documents is None:
            return None
        rng = np.random.default_rng(0)
        ends = np.sort(rng.choice(np.arange(1, self.length), (self.batch, self.documents - 1)), axis=1)
        return (np.arange(self.length)[None, :, None] >= ends[:, None, :]).sum(-1).astype(np.int32)

    def flops(self) -> float:
        """FLOPs of the forward pass."""
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
        return 2.0 * total * self.heads * (self.head_dim + (self.value_dim or self.head_dim))


WORKS = (
    Work(4, 4096, 32, 8, 128),
    Work(1, 16384, 32, 8, 128),
    Work(4, 4096, 16, 16, 64),
    Work(2, 8192, 16, 16, 128, causal=False),
    Work(1, 16384, 32, 8, 128, documents=8),
    Work(1, 16384, 32, 8, 128, window=1024),
    Work(1, 65536, 32, 8, 128, window=1024),
    Work(4, 4096, 16, 16, 80),
    Work(4, 4096, 16, 16, 96),
    Work(4, 4096, 16, 16, 192),
    Work(4, 4096, 8, 8, 256),
    Work(4, 4096, 8, 2, 512),
    Work(1, 16384, 8, 2, 512, documents=8),
    Work(1, 4096, 64, 8, 64, sinks=True),
    Work(1, 16384, 64, 8, 64, sinks=True),
    Work(1, 16384, 64, 8, 64, window=128, sinks=True),
    Work(2, 4096, 32, 32, 192, value_dim=128),
    Work(1, 16384, 32, 32, 192, value_dim=128),
)


# --- jax ----------------------------------------------------------------------------------------------------------


def jax_arrays(work: Work, seed: int = 0) -> list:
    import jax
    import jax.numpy as jnp

    heads = (work.heads, work.kv_heads, work.kv_heads, work.heads)
    values = work.value_dim or work.head_dim
    widths = (work.head_dim, work.head_dim, values, values)
    keys = jax.random.split(jax.random.key(seed), 4)
    return [
        jax.random.normal(key, (work.batch, work.length, n, width), jnp.bfloat16)
        for key, n, width in zip(keys, heads, widths, strict=True)
    ]


def ours(implementation: str | None, work: Work, ids: Any, **options: Any) -> Callable:
    from pallas_kernels import flash_attention

    mask = {"causal": work.causal, "window": work.window, "segment_ids": ids}
    if work.sinks:
        options = {"sinks": np.linspace(-2, 2, work.heads, dtype=np.float32), **options}
    return functools.partial(flash_attention, **mask, implementation=implementation, **options)


def with_padded_values(attention: Callable, work: Work) -> Callable:
    """The same with values padded to the width of the keys, as where a kernel takes equal widths only."""
    import jax.numpy as jnp

    missing = work.head_dim - (work.value_dim or work.head_dim)

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = attention(q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))), **options)
        return out[..., : work.value_dim]

    return attend


def tokamax_attention(work: Work) -> Callable:
    import tokamax

    window = {} if work.window is None else {"local_window_size": (work.window - 1, 0)}
    mask = {"is_causal": work.causal, **window}
    return functools.partial(tokamax.dot_product_attention, **mask, implementation="mosaic")


def cudnn_with_mask(work: Work, ids: Any) -> Callable:
    """One way to compute packed documents with cuDNN: a dense mask."""
    import jax

    mask = {"mask": ids[:, None, :, None] == ids[:, None, None, :], "is_causal": work.causal}
    return functools.partial(jax.nn.dot_product_attention, **mask, implementation="cudnn")


def cudnn_padded(work: Work) -> Callable:
    """Another way: a batch of documents, each padded to the longest; for one sequence with known documents."""
    import jax
    import jax.numpy as jnp

    ids = work.segment_ids()
    if ids is None or work.batch != 1:
        raise ValueError("needs one packed sequence")
    lengths = np.bincount(ids[0])
    starts = np.cumsum(lengths) - lengths
    longest = -(-int(lengths.max()) // 64) * 64
    take = np.minimum(starts[:, None] + np.arange(longest), work.length - 1)
    back = ids[0] * longest + np.arange(work.length) - starts[ids[0]]
    sizes = jnp.asarray(lengths, jnp.int32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x[0][take] for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=work.causal, query_seq_lengths=sizes, key_value_seq_lengths=sizes, implementation="cudnn"
        )
        return out.reshape(-1, *out.shape[2:])[back][None]

    return attend


def jax_implementations(work: Work, ids: Any) -> dict[str, Callable[[], Callable]]:
    """Name -> what makes the attention."""
    if work.head_dim > 256:  # No other kernel has heads of this width.
        return {f"jaxstack {name}": functools.partial(ours, name, work, ids) for name in ("triton", "xla")}
    table: dict[str, Callable[[], Callable]] = {"jaxstack mosaic": lambda: ours("mosaic", work, ids)}
    if work.sinks:
        plain = dataclasses.replace(work, sinks=False)
        table["jaxstack mosaic without sinks"] = lambda: ours("mosaic", plain, ids)
    elif work.value_dim:
        for name, implementation in (("jaxstack mosaic", "mosaic"), ("cudnn (jax)", "cudnn")):
            table[f"{name}, padded values"] = lambda name=implementation: with_padded_values(
                ours(name, work, ids), work
            )
    elif work.documents is None:
        table["cudnn (jax)"] = lambda: ours("cudnn", work, ids)
    else:
        table["cudnn with a mask (jax)"] = lambda: cudnn_with_mask(work, ids)
        table["cudnn, padded documents (jax)"] = lambda: cudnn_padded(work)
    if work.head_dim in (64, 128) and not work.window and not work.sinks:
        table["jaxstack mosaic_deterministic"] = lambda: ours("mosaic_deterministic", work, ids)
        if importlib.util.find_spec("jax_triton"):
            table["jaxstack triton"] = lambda: ours("triton", work, ids)
    if importlib.util.find_spec("tokamax") and ids is None and not work.sinks and not work.value_dim:
        table["tokamax"] = lambda: tokamax_attention(work)
    return table


def time_jax(work: Work, only: str) -> dict[str, dict[str, float] | str]:
    """Seconds of the forward, and of forward and backward, or the reason why there are none."""
    import jax
    import jax.numpy as jnp

    q, k, v, d_out = jax_arrays(work)
    ids = work.segment_ids()
    ids = None if ids is None else jnp.asarray(ids)
    found: dict[str, dict[str, float] | str] = {}
    runs: dict[str, tuple[Callable, Callable]] = {}
    for name, make in jax_implementations(work, ids).items():
        if only not in name:
            continue
        try:
            attention = make()
            forward = jax.jit(attention)
            both = jax.jit(lambda q, k, v, d_out, attention=attention: jax.vjp(attention, q, k, v)[1](d_out))
            jax.block_until_ready((forward(q, k, v), both(q, k, v, d_out)))
            runs[name] = (functools.partial(forward, q, k, v), functools.partial(both, q, k, v, d_out))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    samples: dict[str, list] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, functions in runs.items():
            samples[name].append([median_seconds(function, jax.block_until_ready) for function in functions])
    for name, turns in samples.items():
        forward, both = (statistics.median(turn[part] for turn in turns) for part in (0, 1))
        found[name] = {"forward": forward, "both": both}
    return found


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
    (Work(1, 1000, 8, 2, 64, window=128, sinks=True), {}),
    (Work(1, 1000, 4, 4, 192, value_dim=128), {}),
    (Work(1, 1000, 4, 4, 192, value_dim=128, documents=3), {}),
)


def results_of(attention: Callable, arrays: list) -> dict[str, np.ndarray]:
    """out, lse and gradients, with a cotangent for the log-sum-exp too."""
    import jax
    import jax.numpy as jnp

    q, k, v, d_out = arrays

    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        outputs, pullback = jax.vjp(functools.partial(attention, return_lse=True), q, k, v)
        return *outputs, *pullback((d_out.astype(q.dtype), jnp.sin(outputs[1])))

    names = ("out", "lse", "d_q", "d_k", "d_v")
    return {n: np.asarray(x, np.float32) for n, x in zip(names, jax.jit(run)(q, k, v, d_out), strict=True)}


def check_errors(only: str) -> set[str]:
    """Prints our kernels' errors against float32 by those of a plain version in bf16; returns the names that fail."""
    import jax
    import jax.numpy as jnp

    failed = set()
    names = ["mosaic", "mosaic_deterministic", *(["triton"] if importlib.util.find_spec("jax_triton") else [])]
    for work, options in CHECKS:
        ids = work.segment_ids()
        ids = None if ids is None else jnp.asarray(ids)
        arrays = jax_arrays(work, seed=1)
        # On the CPU: XLA tunes matmuls for a GPU, which takes longer than these.
        with jax.default_device(jax.devices("cpu")[0]):
            here = [jnp.asarray(np.asarray(x)) for x in arrays]
            truth = results_of(ours("reference", work, ids, **options), [x.astype(jnp.float32) for x in here])
            plain = results_of(ours("xla_dense", work, ids, **options), here)
        for name in names:
            if only not in f"jaxstack {name}":
                continue
            try:
                actual = results_of(ours(name, work, ids, **options), arrays)
                ratios = {}
                for key, exact in truth.items():
                    error, allowed = (np.linalg.norm(x[key] - exact) / np.linalg.norm(exact) for x in (actual, plain))
                    ratios[key] = float(error / max(allowed, 1e-6))
                good = all(ratio <= 2.0 for ratio in ratios.values())
                words = " ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
            except Exception as error:
                good = False
                words = f"{type(error).__name__}: {str(error)[:300]}"
            if not good:
                failed.add(name)
            shown = f"{'ok  ' if good else 'FAIL'} {name:20s} {work} {options or ''}"
            print(f"{shown}: error / plain bf16: {words}", flush=True)
    return failed


# --- torch, in a process of its own -------------------------------------------------------------------------------


def torch_rows(only: str, works: str) -> None:
    """Prints one JSON line for each measurement."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn (torch)": SDPBackend.CUDNN_ATTENTION, "flash (torch)": SDPBackend.FLASH_ATTENTION}
    for work in WORKS:
        for name, backend in backends.items():
            special = work.window or work.documents or work.sinks or work.value_dim
            if only not in name or works not in str(work) or special:
                continue
            try:
                shape = (work.batch, work.heads, work.length, work.head_dim)
                kv_shape = (work.batch, work.kv_heads, work.length, work.head_dim)
                q, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                k, v = (torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                for x in (q, k, v):
                    x.requires_grad_()

                options = {"is_causal": work.causal, "enable_gqa": work.heads != work.kv_heads}

                def attend(inputs=(q, k, v), options=options, backend=backend):
                    with sdpa_kernel([backend]):
                        return torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

                def both(attend=attend, inputs=(q, k, v), d_out=d_out):
                    return torch.autograd.grad(attend(), inputs, d_out)

                def median(run):
                    return statistics.median(
                        median_seconds(run, lambda _: torch.cuda.synchronize()) for _ in range(TURNS)
                    )

                with torch.no_grad():
                    forward = median(attend)
                row = {"forward": forward, "both": median(both)}
                print(json.dumps({"work": str(work), "name": f"{name} {torch.__version__}", **row}), flush=True)
            except Exception as error:
                print(json.dumps({"work": str(work), "name": name, "error": f"{error}"[:200]}), flush=True)


def run_torch(only: str, works: str) -> list[tuple[str, str, dict[str, float] | str]]:
    """(work, implementation, seconds or reason) of each measurement of torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    command = [sys.executable, __file__, "--torch-rows", "--only", only, "--works", works]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        print("torch: took more than 180 s")
        return []
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print("torch:", (process.stderr.strip().splitlines() or ["no rows"])[-1])
    return [
        (row["work"], row["name"], row.get("error") or {part: row[part] for part in ("forward", "both")})
        for row in lines
    ]


# --- table --------------------------------------------------------------------------------------------------------


def rows_of(work: Work, name: str, result: dict[str, float] | str) -> list[dict[str, Any]]:
    """Prints a line and returns its rows; a string is the reason why there is no number."""
    import jax

    if isinstance(result, str):
        print(f"  {name:32s} {result[:160]}", flush=True)
        return []
    rows = []
    words = []
    for part, factor in (("forward", 1.0), ("both", 3.5)):
        seconds = result[part]
        title = "forward" if part == "forward" else "forward+backward"
        tflops = factor * work.flops() / seconds / 1e12
        words.append(f"{title} {tflops:6.1f} TFLOP/s {1e3 * seconds:8.3f} ms")
        rows.append({
            "work": f"attention {title} {work}", "implementation": name, "device": jax.devices()[0].device_kind,
            "devices": 1, "tflops_per_device": round(tflops, 1), "milliseconds": round(1e3 * seconds, 4),
        })  # fmt: skip
    print(f"  {name:32s} {'   '.join(words)}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="implementations whose name contains this")
    parser.add_argument("--works", default="", help="shapes whose name contains this")
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="draw this number of shapes instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn shapes")
    parser.add_argument(
        "--processes", type=int, help="number of processes that compile drawn shapes; default: one per core"
    )
    parser.add_argument("--indices", default="", help=argparse.SUPPRESS)
    parser.add_argument("--torch-rows", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch_rows:
        torch_rows(arguments.only, arguments.works)
        return 0
    import jax

    from benchmarks.rows import append_rows

    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU and jax[cuda13]", file=sys.stderr)
        return 2
    if arguments.random:
        from benchmarks.attention.attention_random import run_random

        run_random(arguments.random, arguments.seed, arguments.processes, arguments.indices)
        return 0
    failed = set() if arguments.skip_checks else check_errors(arguments.only)
    for work in WORKS:
        if arguments.works not in str(work):
            continue
        print(work, flush=True)
        for name, result in time_jax(work, arguments.only).items():
            append_rows("attention", rows_of(work, name, result))
    print("torch")
    works = {str(work): work for work in WORKS}
    for work, name, result in run_torch(arguments.only, arguments.works):
        print(work)
        append_rows("attention", rows_of(works[work], name, result))
    print("failed checks:", ", ".join(sorted(failed)) or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
