"""RMSNorm, RoPE and SwiGLU as XLA fuses them, against the time that their bytes take at the speed of a plain copy.

    python benchmarks/kernels/pointwise.py     # under a minute on an H200

Shapes are those of llama3-8b with 4 sequences of 4096 tokens, in bfloat16. The roofline counts every array that an
operation must read or write once; forward and backward are two programs, as in training. Its bandwidth is that of
y = -x on the same device in the same run. Rows are appended to benchmarks/results/pointwise.jsonl.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks.rows import append_rows, print_table
from pallas_kernels import apply_rotary, rms_norm, swiglu

BATCH = 4
LENGTH = 4096
WIDTH = 4096
INNER = 14336
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
REPEATS = 4
"""Times that one program runs an operation, each on arrays of its own, so that launching it costs nothing."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """An operation and its gradient as functions of large bfloat16 arrays, with small ones closed over."""

    name: str
    forward: Callable[..., Any]
    forward_shapes: tuple[Shape, ...]
    backward: Callable[..., Any]
    backward_shapes: tuple[Shape, ...]


def works(batch: int = BATCH, length: int = LENGTH) -> list[Work]:
    """Return the works for `batch` sequences of `length` tokens."""
    weight = jnp.ones((WIDTH,), jnp.float32)
    angles = jnp.arange(length)[:, None] * 500_000.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    stream = (batch, length, WIDTH)
    inner = (batch, length, INNER)
    heads = (batch, length, HEADS, HEAD_DIM), (batch, length, KV_HEADS, HEAD_DIM)

    def normalise(x: jax.Array, weight: jax.Array = weight) -> Any:
        return rms_norm(x, weight)

    def rotate(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    def norm_gradient(x: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(normalise, x, weight)[1](d_out)

    def residual_gradient(total: jax.Array, d_out: jax.Array, d_total: jax.Array) -> Any:
        # The forward keeps x + residual, not the two.
        return jax.vjp(lambda x, w: (normalise(x, w), x), total, weight)[1]((d_out, d_total))

    def rotate_gradient(d_q: jax.Array, d_k: jax.Array) -> Any:
        return jax.vjp(rotate, d_q, d_k)[1]((d_q, d_k))

    def swiglu_gradient(gate: jax.Array, up: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(swiglu, gate, up)[1](d_out)

    def add_and_normalise(x: jax.Array, residual: jax.Array) -> Any:
        return rms_norm(x, weight, residual=residual)

    return [
        Work("rms_norm", normalise, (stream,), norm_gradient, (stream,) * 2),
        Work("rms_norm with residual", add_and_normalise, (stream,) * 2, residual_gradient, (stream,) * 3),
        Work("rope of q and k", rotate, heads, rotate_gradient, heads),
        Work("swiglu", swiglu, (inner,) * 2, swiglu_gradient, (inner,) * 3),
    ]


def repeated(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """One program that runs `function` on every tuple of arrays of a list."""
    return jax.jit(lambda sets: [function(*arrays) for arrays in sets])


def moved_bytes(function: Callable[..., Any], shapes: tuple[Shape, ...]) -> int:
    """Return the bytes of the large inputs and outputs, each counted once."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    both = [*arrays, *jax.tree.leaves(jax.eval_shape(function, *arrays))]
    return sum(x.size * x.dtype.itemsize for x in both)


def seconds(function: Callable[..., Any], shapes: tuple[Shape, ...]) -> float:
    """Median time of one call of `function` on normal values."""

    @jax.jit
    def make(key: jax.Array) -> list[list[jax.Array]]:
        keys = jax.random.split(key, (REPEATS, len(shapes)))
        return [
            [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(row, shapes, strict=True)]
            for row in keys
        ]

    sets = make(jax.random.key(0))
    run = repeated(function)
    jax.block_until_ready(run(sets))
    samples = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(10):
            result = run(sets)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - begin) / 10 / REPEATS)
    return statistics.median(samples)


def measure(work: Work, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of the forward, and of forward and backward together."""
    forward = seconds(work.forward, work.forward_shapes), moved_bytes(work.forward, work.forward_shapes)
    backward = seconds(work.backward, work.backward_shapes), moved_bytes(work.backward, work.backward_shapes)
    rows = []
    both = forward[0] + backward[0], forward[1] + backward[1]
    for part, (taken, size) in (("forward", forward), ("forward+backward", both)):
        row = {"work": f"{work.name} {part} {' '.join(map(str, work.forward_shapes[0]))} bf16"}
        row |= {"implementation": "jaxstack xla", "device": jax.devices()[0].device_kind, "devices": 1}
        row |= {"milliseconds": 1e3 * taken, "gigabytes_per_second": size / taken / 1e9}
        row |= {"copy_gigabytes_per_second": bandwidth / 1e9, "roofline_fraction": size / bandwidth / taken}
        rows.append(row)
    return rows


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU and jax[cuda13]", file=sys.stderr)
        return 2
    shape = (BATCH, LENGTH, INNER)
    bandwidth = moved_bytes(jnp.negative, (shape,)) / seconds(jnp.negative, (shape,))
    rows = [row for work in works() for row in measure(work, bandwidth)]
    rates = "gigabytes_per_second", "copy_gigabytes_per_second", "roofline_fraction"
    print_table(rows, ("work", "milliseconds", *rates))
    append_rows("pointwise", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
