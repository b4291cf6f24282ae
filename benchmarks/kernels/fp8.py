"""FP8 matrix products, quantization included, against bfloat16, at the shapes of llama3-1b and llama3-8b layers.

    python benchmarks/kernels/fp8.py                                  # about 4 minutes on an H200
    python benchmarks/kernels/fp8.py --model llama3-8b --recipes bfloat16 current
    python benchmarks/kernels/fp8.py --tiny                           # on a CPU

"error" is that of the forward's result against float32 sums, relative, in the Frobenius norm: about 0.04 for E4M3.

A work is one weight: x [rows, D] times [D, outputs]. "forward" quantizes both and multiplies; "forward and backward"
also quantizes the incoming gradient and computes both gradients. "FP8 matmul alone" is what the forward would take
were its operands in FP8 already, "FP8 weight gradient alone" (blockwise) the same product with scales as a weight's
gradient has: for 128 x 128 values of the left operand, and for 128 values of the right one. Rows are appended to
benchmarks/results/fp8.jsonl.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from jaxstack.distributed.xla_options import step_options
from pallas_kernels import empty_fp8_state, fp8_multiply, record_choices
from pallas_kernels.fp8 import blockwise, mosaic
from pallas_kernels.fp8.api import RECIPES as FP8_RECIPES
from pallas_kernels.fp8.formats import E4M3, Quantized, dequantize, quantize

WORKS = {
    "llama3-1b": {"rows": 32768, "q_proj": (2048, 2048), "gate_proj": (2048, 8192), "down_proj": (8192, 2048)},
    "llama3-8b": {"rows": 16384, "q_proj": (4096, 4096), "gate_proj": (4096, 14336), "down_proj": (14336, 4096)},
}
TINY = {"rows": 128, "gate_proj": (128, 256)}
RECIPES = ("bfloat16", *FP8_RECIPES)
PASSES = {"forward": 2, "forward and backward": 6}
"""FLOPs of a multiply-add: one product, or three."""

Product = Callable[[jax.Array, jax.Array], jax.Array]


def make_product(recipe: str) -> Product:
    """x, w -> x @ w in one recipe."""
    if recipe == "bfloat16":
        return jnp.matmul
    states = (empty_fp8_state(),) if recipe == "delayed" else (None,)
    return lambda x, w: fp8_multiply(x, (w,), recipe=recipe, states=states)[0]


def make_pass(product: Product, name: str) -> Callable[..., Any]:
    """A pass as a function of x, w and the incoming gradient."""
    if name == "forward":
        return lambda x, w, gradient: product(x, w)

    def both(x: jax.Array, w: jax.Array, gradient: jax.Array) -> Any:
        out, pull = jax.vjp(product, x, w)
        return out, pull(gradient)

    return both


def compile_as_in_training(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    """A call of it with these arrays; without the options of a training step XLA would leave quantizations out."""
    options: Any = step_options() if jax.default_backend() == "gpu" else None
    return functools.partial(jax.jit(function).lower(*arrays).compile(compiler_options=options), *arrays)


def seconds(function: Callable[..., Any], *arrays: Any) -> tuple[float, str]:
    """Median time of a call, and the backend that it took."""
    with record_choices() as choices:
        run = compile_as_in_training(function, *arrays)
    return median_seconds(run, jax.block_until_ready), choices[0].backend if choices else "xla"


def measure(model: str, name: str, recipe: str, arrays: tuple[jax.Array, ...]) -> list[dict[str, Any]]:
    """Rows of one recipe at one shape."""
    (rows, inner), outputs = arrays[0].shape, arrays[1].shape[1]
    described = {"work": f"{model} {name}", "shape": f"{rows} x {inner} x {outputs}", "implementation": "jaxstack"}
    found = []
    product = make_product(recipe)
    error = error_of(compile_as_in_training(product, *arrays[:2])(), arrays)
    for pass_name, flops in PASSES.items():
        time, backend = seconds(make_pass(product, pass_name), *arrays)
        rate = flops * rows * inner * outputs / time / 1e12
        row = {"variant": f"{recipe}, {pass_name}", "backend": backend, "error": error}
        found.append({**described, **row, "milliseconds": 1e3 * time, "tflops_per_device": rate})
    return found


def error_of(found: jax.Array, arrays: tuple[jax.Array, ...]) -> float:
    """Return the relative error of x @ w against float32 accumulation."""
    exact = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))(*arrays[:2])
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def products_alone(recipe: str, arrays: tuple[jax.Array, ...]) -> dict[str, tuple[Any, Any, Any]]:
    """Pass -> a product, and operands that are quantized before, both with the summed dim contiguous."""
    x, w = arrays[:2]
    if recipe == "current":

        def product(x: Any, w: Any) -> jax.Array:
            return dequantize(x, jnp.bfloat16) @ dequantize(w, jnp.bfloat16).T

        return {"FP8 matmul alone": (product, quantize(x, E4M3), quantize(w.T, E4M3))}
    if recipe != "blockwise" or jax.default_backend() != "gpu":
        return {}
    left = jax.jit(blockwise.quantize_rows)(x)
    whole = jax.jit(blockwise.quantize_weight)(w)
    blocks = jax.jit(blockwise.quantize_weight)(x.T)
    turned = jax.jit(blockwise.quantize_rows)(w.T)

    def scaled(a: Quantized, b: Quantized) -> jax.Array:
        return mosaic.product([(a, b)], jnp.bfloat16)

    return {
        "FP8 matmul alone": (scaled, left, Quantized(whole.values.T, whole.inverse_scale)),
        "FP8 weight gradient alone": (scaled, Quantized(blocks.values.T, blocks.inverse_scale), turned),
    }


def measure_alone(model: str, name: str, recipe: str, arrays: tuple[jax.Array, ...]) -> list[dict[str, Any]]:
    """Rows of a recipe's products without its quantization."""
    (rows, inner), outputs = arrays[0].shape, arrays[1].shape[1]
    found = []
    for pass_name, (product, *operands) in products_alone(recipe, arrays).items():
        run = compile_as_in_training(product, *operands)
        time = median_seconds(run, jax.block_until_ready)
        found.append({
            "work": f"{model} {name}", "shape": f"{rows} x {inner} x {outputs}", "implementation": "jaxstack",
            "variant": f"{recipe}, {pass_name}", "backend": "cublas" if recipe == "current" else "mosaic",
            "error": error_of(run(), arrays), "milliseconds": 1e3 * time,
            "tflops_per_device": 2 * rows * inner * outputs / time / 1e12,
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(WORKS), choices=WORKS, help="whose weights")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help="to measure")
    parser.add_argument("--rows", type=positive(int), help="tokens; default: those of a step on one device")
    parser.add_argument("--tiny", action="store_true", help="one small weight; rows go to tiny/")
    args = parser.parse_args()
    works: dict[str, Any] = {"tiny": TINY} if args.tiny else {model: WORKS[model] for model in args.model}
    device = {"device": jax.devices()[0].device_kind, "devices": 1}
    rows: list[dict[str, Any]] = []
    for model, weights in works.items():
        tokens = args.rows or weights["rows"]
        for name, shape in weights.items():
            if name == "rows":
                continue
            keys = jax.random.split(jax.random.key(0), 3)
            x = jax.random.normal(keys[0], (tokens, shape[0]), jnp.bfloat16)
            w = jax.random.normal(keys[1], shape, jnp.bfloat16) * 0.02
            gradient = jax.random.normal(keys[2], (tokens, shape[1]), jnp.bfloat16) * 1e-3
            arrays = (x, w, gradient)
            found = []
            for recipe in args.recipes:
                found += measure_alone(model, name, recipe, arrays) + measure(model, name, recipe, arrays)
            for row in found:
                print(*(f"{key} {value}" for key, value in row.items()), sep=", ", flush=True)
            found = [{**row, **device} for row in found]
            append_rows("tiny/fp8" if args.tiny else "fp8", found)
            rows += found
    print_table(rows, ["work", "shape", "variant", "backend", "milliseconds", "tflops_per_device", "error"])


if __name__ == "__main__":
    main()
