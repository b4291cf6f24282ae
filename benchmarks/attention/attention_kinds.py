"""Longformer, block-sparse, linear attention and Performer beside full causal attention, on one GPU.

    python benchmarks/attention/attention_kinds.py  # errors, then all rows: under two minutes on an H200
    python benchmarks/attention/attention_kinds.py --only linear       # kinds whose name contains the word, and flash
    python benchmarks/attention/attention_kinds.py --chunk 64 128 256  # linear attention with other chunks

One sequence, 16 heads, bfloat16, causal. `density` is the share of the causal pairs of query and key that a kind
computes, `speedup` is against flash attention as this repository chooses it. Longest sequences come first; what does
not fit into `--seconds` is left out. Rows are appended to benchmarks/results/attention_kinds.jsonl.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from pallas_kernels import (
    block_sparse_attention,
    flash_attention,
    linear_attention,
    longformer_attention,
    performer_attention,
    random_projection,
    record_choices,
)
from pallas_kernels.attention.patterns import bigbird, strided

HEADS = 16
LENGTHS = (32768, 16384, 4096)
HEAD_DIMS = (128, 64)
WINDOW = 512
GLOBAL_TOKENS = 64
BLOCK = 128
FEATURES = 256
START = time.monotonic()

Attention = Callable[..., Any]


def layouts(length: int) -> dict[str, np.ndarray]:
    """Block-sparse patterns from sparse to full, to see whether the time follows."""
    blocks = length // BLOCK
    return {
        "bigbird": bigbird(blocks, window=3, global_blocks=1, random_blocks=2),
        "strided": strided(blocks, local=8, stride=8),
        "half": np.tril(np.add.outer(np.arange(blocks), np.arange(blocks)) % 2 == 0),
        "full": np.tril(np.ones((blocks, blocks), bool)),
    }


def layout_density(layout: np.ndarray) -> float:
    """Return the share of the causal pairs that are computed; a diagonal block has half of its pairs."""
    weight = np.tril(np.ones(layout.shape)) - 0.5 * np.eye(len(layout))
    return float((layout * weight).sum() / weight.sum())


def longformer_density(length: int) -> float:
    position = np.arange(length)
    near = np.minimum(position + 1, WINDOW)
    far = np.clip(position + 1 - WINDOW, 0, GLOBAL_TOKENS)
    return float((near + far).sum() / (position + 1).sum())


def kinds(length: int, head_dim: int, chunks: list[int]) -> dict[str, tuple[Attention, float | None]]:
    """Name -> function of q, k, v and its density; None where no pairs are computed."""
    projection = random_projection(FEATURES, head_dim)
    table: dict[str, tuple[Attention, float | None]] = {
        "flash": (flash_attention, 1.0),
        f"longformer {WINDOW}+{GLOBAL_TOKENS}": (
            lambda *x, **o: longformer_attention(*x, window=WINDOW, global_tokens=GLOBAL_TOKENS, **o),
            longformer_density(length),
        ),
        "linear elu": (linear_attention, None),
        f"performer {FEATURES}": (lambda *x, **o: performer_attention(*x, projection=projection, **o), None),
    }
    for name, layout in layouts(length).items():
        table[f"block_sparse {name}"] = (
            lambda *x, layout=layout, **o: block_sparse_attention(*x, layout=layout, block_size=BLOCK, **o),
            layout_density(layout),
        )
    for chunk in chunks:
        table[f"linear elu chunk {chunk}"] = (lambda *x, c=chunk, **o: linear_attention(*x, chunk=c, **o), None)
    return table


def arrays(length: int, head_dim: int) -> list[jax.Array]:
    """q, k, v and the cotangent of out."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, length, HEADS, head_dim), jnp.bfloat16) for key in keys]


def forward_and_backward(attention: Attention) -> Attention:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out.astype(out.dtype))

    return run


def error_of(name: str, attention: Attention) -> str:
    """The largest relative error of out and gradients in bfloat16, against the reference in float32."""
    x = arrays(1024, 64)
    exact = jax.jit(forward_and_backward(lambda *x: attention(*x, implementation="reference")))
    truth = jax.tree.leaves(exact(*(a.astype(jnp.float32) for a in x)))
    actual = jax.tree.leaves(jax.jit(forward_and_backward(attention))(*x))
    errors = [
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(actual, truth, strict=True)
    ]
    words = " ".join(f"{part} {error:.1e}" for part, error in zip(("out", "d_q", "d_k", "d_v"), errors, strict=True))
    return f"{'ok  ' if max(errors) < 0.02 else 'FAIL'} {name}: relative error {words}"


def measure(length: int, head_dim: int, only: str, chunks: list[int]) -> list[dict[str, Any]]:
    """Rows of every kind at one shape. All programs are compiled side by side before the first is timed."""
    x = arrays(length, head_dim)
    chosen = {n: kind for n, kind in kinds(length, head_dim, chunks).items() if only in n or n == "flash"}

    def prepare(item: tuple[str, tuple[Attention, float | None]]) -> tuple[str, list[Any], str]:
        name, (attention, _) = item
        with record_choices() as choices:
            lowered = [jax.jit(attention).lower(*x[:3]), jax.jit(forward_and_backward(attention)).lower(*x)]
        return name, [program.compile() for program in lowered], choices[0].backend if choices else "unknown"

    with ThreadPoolExecutor(8) as pool:
        ready = list(pool.map(prepare, chosen.items()))
    rows = []
    baseline = {}
    for name, programs, backend in ready:
        for part, program, inputs in zip(("forward", "forward+backward"), programs, (x[:3], x), strict=True):
            taken = median_seconds(lambda p=program, i=inputs: p(*i), jax.block_until_ready)
            baseline.setdefault(part, taken)
            memory = program.memory_analysis()
            row = {"work": f"attention kinds {part} 1, {length}, {HEADS}/{HEADS}, {head_dim} causal bf16"}
            row |= {"implementation": f"jaxstack {name}", "backend": backend, "density": chosen[name][1]}
            row |= {"milliseconds": 1e3 * taken, "speedup": baseline[part] / taken}
            row |= {"temporary_bytes": memory.temp_size_in_bytes if memory else None}
            row |= {"device": jax.devices()[0].device_kind, "devices": 1}
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--chunk", type=int, nargs="*", default=[], help="also linear attention in such chunks")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further shape after so long")
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU and jax[cuda13]", file=sys.stderr)
        return 2
    if not arguments.skip_checks:
        table = {name: kind[0] for name, kind in kinds(1024, 64, []).items() if arguments.only in name}
        with ThreadPoolExecutor(8) as pool:
            for line in pool.map(error_of, table.keys(), table.values()):
                print(line, flush=True)
    for length in LENGTHS:
        for head_dim in HEAD_DIMS:
            if time.monotonic() - START > arguments.seconds:
                print(f"(out of time at {length}, {head_dim})")
                return 1
            rows = measure(length, head_dim, arguments.only, arguments.chunk)
            print_table(rows, ("work", "implementation", "backend", "density", "milliseconds", "speedup"))
            append_rows("attention_kinds", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
