"""The grouped matmul, forward and with gradients: ours in bfloat16 and FP8, one dense matmul, and `lax.ragged_dot`.

    python benchmarks/kernels/grouped_matmul.py                 # errors, then all rows
    python benchmarks/kernels/grouped_matmul.py --only mixtral  # works whose name contains the word
    python benchmarks/kernels/grouped_matmul.py --variants      # our kernels with other constants

Rows are tokens times experts a token. Their groups are uneven: the fullest of 128 has about twice an even share.
FLOPs: 2 x rows x D x F forward, three times that with both gradients; padding is not counted. FP8 quantizes rows,
weights and the incoming gradient within the measured time; "products alone" are of rows and weights in FP8 already.
Rows are appended to benchmarks/results/grouped_matmul.jsonl.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from pallas_kernels import fp8_grouped_matmul, grouped_matmul, grouped_matmul_alignment
from pallas_kernels.fp8 import triton
from pallas_kernels.fp8.formats import Quantized
from pallas_kernels.fp8.sources import IDENTITY
from pallas_kernels.grouped_gemm.groups import aligned_rows, realign
from pallas_kernels.grouped_gemm.mosaic_fp8 import Fp8Kernels
from pallas_kernels.target import multiprocessors

WORKS = {
    "grouped matmul mixtral 16384 tokens up": (32768, 8, 4096, 14336),
    "grouped matmul mixtral 16384 tokens down": (32768, 8, 14336, 4096),
    "grouped matmul mixtral expert8 16384 tokens up": (32768, 1, 4096, 14336),
    "grouped matmul qwen3 8192 tokens up": (65536, 128, 2048, 768),
    "grouped matmul qwen3 8192 tokens down": (65536, 128, 768, 2048),
    "grouped matmul qwen3 expert8 65536 tokens up": (65536, 16, 2048, 768),
    "grouped matmul qwen3 16384 tokens up": (131072, 128, 2048, 768),
    "grouped matmul gpt-oss 16384 tokens up": (65536, 32, 2880, 2880),
}
"""Rows, groups, D, F."""
SMALL = (2048, 8, 512, 768)
"""What the errors are measured at."""
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "128 columns a tile": {"_COLUMNS": (128, 64)},
    "192 columns a tile": {"_COLUMNS": (192, 128, 64)},
    "3 stages": {"STAGES": 3},
    "panels of 8": {"PANEL": 8},
    "panels of 32": {"PANEL": 32},
}
"""Values of pallas_kernels.grouped_gemm.mosaic_kernels."""


def group_sizes(rows: int, groups: int) -> np.ndarray:
    """Uneven sizes, int32 [G], that sum to `rows`."""
    random = np.random.default_rng(0)
    shares = random.gamma(8.0, size=groups)
    return random.multinomial(rows, shares / shares.sum()).astype(np.int32)


def make_arrays(shape: tuple[int, int, int, int], alignment: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x [R, D] laid out with this alignment, weights [G, D, F], sizes [G], and the cotangent [R, F], in bfloat16."""
    rows, groups, depth, columns = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = jnp.asarray(group_sizes(rows, groups))
    x = jax.random.normal(keys[0], (rows, depth), jnp.bfloat16)
    cotangent = jax.random.normal(keys[1], (rows, columns), jnp.bfloat16)
    weights = jax.random.normal(keys[2], (groups, depth, columns), jnp.bfloat16) * depth**-0.5
    if alignment > 1:
        room = aligned_rows(rows, groups, alignment)
        x, cotangent = (realign(a, sizes, 1, alignment, room) for a in (x, cotangent))
    return x, weights, sizes, cotangent


def implementations() -> dict[str, tuple[int, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]]]:
    """Name -> (alignment of its rows, function of x, weights, sizes)."""
    tile = grouped_matmul_alignment(1, 1)

    def ours(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return grouped_matmul(x, weights, sizes, alignment=tile)

    def dense(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return x @ weights[0]

    def fp8(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return fp8_grouped_matmul(x, (weights,), sizes, alignment=grouped_matmul_alignment(1, 1, fp8=True))[0]

    return {
        "jaxstack": (tile, ours),
        "jaxstack, FP8": (grouped_matmul_alignment(1, 1, fp8=True), fp8),
        "jaxstack, groups not aligned": (1, grouped_matmul),
        "one dense matmul": (1, dense),
        "lax.ragged_dot": (1, jax.lax.ragged_dot),
    }


def time_one(name: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """One row of one implementation."""
    alignment, function = implementations()[name]
    x, weights, sizes, cotangent = make_arrays(shape, alignment)

    def both(x: jax.Array, weights: jax.Array, cotangent: jax.Array) -> Any:
        out, transpose = jax.vjp(lambda x, weights: function(x, weights, sizes), x, weights)
        return out, transpose(cotangent)

    forward = jax.jit(lambda x, weights: function(x, weights, sizes)).lower(x, weights).compile()
    gradients = jax.jit(both).lower(x, weights, cotangent).compile()
    block = jax.block_until_ready
    seconds = median_seconds(lambda: forward(x, weights), block)
    both_seconds = median_seconds(lambda: gradients(x, weights, cotangent), block)
    flops = 2 * shape[0] * shape[2] * shape[3]
    return {
        "device": jax.devices()[0].device_kind,
        "devices": 1,
        "forward_milliseconds": 1e3 * seconds,
        "forward_tflops_per_device": flops / seconds / 1e12,
        "milliseconds": 1e3 * both_seconds,
        "tflops_per_device": 3 * flops / both_seconds / 1e12,
        "extra_bytes": getattr(gradients.memory_analysis(), "temp_size_in_bytes", 0),
    }


def time_products(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """One row of the FP8 products of the forward pass and the gradients, of operands that are in FP8 already."""
    x, weights, sizes, cotangent = make_arrays(shape, grouped_matmul_alignment(1, 1, fp8=True))
    pad = [-size % 128 for size in weights.shape[1:]]
    x, cotangent = (jnp.pad(a, ((0, 0), (0, n))) for a, n in zip((x, cotangent), pad, strict=True))
    matrices = jnp.pad(weights, ((0, 0), (0, pad[0]), (0, pad[1]))).reshape(-1, weights.shape[2] + pad[1])

    @jax.jit
    def quantize(x: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple:
        ((rows, across),) = triton.quantize_both(IDENTITY, (x,), True)
        ((d_rows, d_across),) = triton.quantize_both(IDENTITY, (cotangent,), False)
        weight, transposed = triton.quantize_weight(weights)
        there = rows, Quantized(transposed, weight.inverse_scale)
        back = d_rows, Quantized(weight.values, weight.inverse_scale.T)
        return there, back, across, d_across

    there, back, across, d_across = jax.block_until_ready(quantize(x, matrices, cotangent))
    kernels = Fp8Kernels("bfloat16", multiprocessors())
    block = jax.block_until_ready
    forward = median_seconds(lambda: kernels.rows(sizes, there), block)
    backward = median_seconds(lambda: kernels.rows(sizes, back), block)
    gradient = median_seconds(lambda: kernels.matrices(sizes, across, d_across), block)
    print(f"forward {1e3 * forward:.3f}, d_x {1e3 * backward:.3f}, d_weights {1e3 * gradient:.3f} ms", flush=True)
    seconds = forward + backward + gradient
    flops = 2 * shape[0] * shape[2] * shape[3]
    return {
        "device": jax.devices()[0].device_kind,
        "devices": 1,
        "forward_milliseconds": 1e3 * forward,
        "forward_tflops_per_device": flops / forward / 1e12,
        "milliseconds": 1e3 * seconds,
        "tflops_per_device": 3 * flops / seconds / 1e12,
    }


def largest_error() -> float:
    """Return the errors of out, dx and dW against float32, relative to those of the loop over groups in XLA."""
    shape = SMALL
    alignment = grouped_matmul_alignment(1, 1)

    def run(implementation: str | None, dtype: Any) -> list[np.ndarray]:
        x, weights, sizes, cotangent = make_arrays(shape, alignment)

        def call(x: jax.Array, weights: jax.Array) -> jax.Array:
            return grouped_matmul(x, weights, sizes, alignment=alignment, implementation=implementation)

        @jax.jit
        def all_three(x: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple:
            out, transpose = jax.vjp(call, x, weights)
            return out, *transpose(cotangent)

        found = all_three(*(a.astype(dtype) for a in (x, weights, cotangent)))
        return [np.asarray(a.astype(jnp.float32), np.float64) for a in found]

    with jax.default_matmul_precision("highest"):
        exact = run("reference", jnp.float32)
    ours = run(None, jnp.bfloat16)
    plain = run("xla", jnp.bfloat16)
    norm = np.linalg.norm
    return max(float(norm(o - e) / norm(p - e)) for o, p, e in zip(ours, plain, exact, strict=True))


def run_implementations(work: str, shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Each implementation in turn, and our products of operands that are in FP8 already."""
    rows = []
    for name in implementations():
        rows += attempt(work, name, lambda name=name: time_one(name, shape))
    return rows + attempt(work, "jaxstack, FP8, products alone", lambda: time_products(shape))


def run_variants(work: str, shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Our kernels with each variant's constants."""
    from pallas_kernels.grouped_gemm import mosaic_kernels

    rows = []
    for name, values in VARIANTS.items():
        before = {key: getattr(mosaic_kernels, key) for key in values}
        for key, value in values.items():
            setattr(mosaic_kernels, key, value)
        jax.clear_caches()
        rows += attempt(work, f"jaxstack, {name}", lambda: time_one("jaxstack", shape))
        for key, value in before.items():
            setattr(mosaic_kernels, key, value)
    return rows


def attempt(work: str, implementation: str, run: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the row and return it, or print the reason and return nothing if it does not fit or compile."""
    try:
        row = {"work": work, "implementation": implementation, **run()}
    except (ValueError, RuntimeError) as error:
        print(f"{work}, {implementation}: {str(error)[:300]}", flush=True)
        return []
    print(
        f"{work}, {implementation}: forward {row['forward_tflops_per_device']:.0f}, with gradients "
        f"{row['tflops_per_device']:.0f} TFLOP/s",
        flush=True,
    )
    append_rows("grouped_matmul", [row])
    return [row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="works whose name contains it")
    parser.add_argument("--variants", action="store_true", help="our kernels with other values of their constants")
    args = parser.parse_args()
    error = largest_error()
    print(f"largest error as a multiple of XLA's: {error:.2f}", flush=True)
    rows: list[dict[str, Any]] = []
    for work, shape in WORKS.items():
        if args.only not in work:
            continue
        rows += run_variants(work, shape) if args.variants else run_implementations(work, shape)
    columns = ["work", "implementation", "forward_milliseconds", "forward_tflops_per_device", "milliseconds"]
    print_table(rows, [*columns, "tflops_per_device", "extra_bytes"])
    return int(not error <= 2)


if __name__ == "__main__":
    raise SystemExit(main())
