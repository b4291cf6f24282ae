"""A language model's head with its loss, forward and backward: ours, logits and optax in XLA, and torch, in turn.

    python benchmarks/kernels/linear_cross_entropy.py  # errors, then all rows: about three minutes on an H200
    python benchmarks/kernels/linear_cross_entropy.py --only sum  # implementations whose name contains the word
    python benchmarks/kernels/linear_cross_entropy.py --variants  # the sum form with other sizes of its chunks, ...

Every measurement runs in a process of its own. FLOPs: 6 x tokens x D x V. `extra_bytes` is memory beside inputs and
outputs and `peak_memory_bytes` all of it: of the compiled program's buffers in jax, whose allocator's own peak
(`allocator_peak_bytes`) also counts what XLA tries out while it compiles, and of the allocator in torch. Rows are
appended to benchmarks/results/linear_cross_entropy.jsonl.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.timing import median_seconds

WORKS = {
    "linear cross-entropy 32768 x 4096 x 128256 bf16": (8, 4096, 4096, 128256),
    "linear cross-entropy 65536 x 768 x 50304 bf16": (64, 1024, 768, 50304),
}
"""Sequences, their length, D, V."""
SMALL = (2, 2816, 512, 32768)
"""What the errors are measured at, in as many chunks as the first of the works has."""
VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "chunks of 256 MiB": {"CHUNK_BYTES": 2**28},
    "chunks of 512 MiB": {"CHUNK_BYTES": 2**29},
    "chunks of 1024 MiB": {"CHUNK_BYTES": 2**30},
    "chunks of 2048 MiB": {"CHUNK_BYTES": 2**31},
    "logits read twice for the sum": {"GROUP": 1},
    "gradient beside the logits": {"BLOCKS": 1},
    "float32 sum of the weight's gradient": {"ACCUMULATOR_BYTES": 2**40},
}
"""Values of pallas_kernels.cross_entropy.xla."""


def make_arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [B, T, D] and weight [D, V] in float32 with logits of deviation 2, labels: small ids more often."""
    batch, length, width, vocabulary = shape
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(2**22 + 1, dtype=np.float32)
    hidden = np.resize(pool, (batch, length, width))
    weight = np.resize(pool[::-1], (width, vocabulary)) * np.float32(2 / math.sqrt(width))
    labels = (vocabulary * rng.random((batch, length)) ** 3).astype(np.int32)
    return hidden, weight, labels


# --- jax, in a process of its own ---------------------------------------------------------------------------------


def jax_losses() -> dict[str, Callable]:
    """Name -> function of hidden, weight, labels that gives the sum of the losses."""
    import jax.numpy as jnp
    import optax

    from pallas_kernels import linear_cross_entropy, linear_cross_entropy_sum

    def logits_and_optax(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = jnp.matmul(hidden, weight.astype(hidden.dtype))
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).sum()

    return {
        "jaxstack sum": linear_cross_entropy_sum,
        "jaxstack sum, float32 weight": linear_cross_entropy_sum,
        "jaxstack per token": lambda *arrays: linear_cross_entropy(*arrays).sum(),
        "logits + cross-entropy in XLA": logits_and_optax,
    }


def time_jax(name: str, shape: tuple[int, ...]) -> dict:
    """One row of one implementation."""
    import jax
    import jax.numpy as jnp

    loss = jax_losses()[name]
    hidden, weight, labels = make_arrays(shape)
    dtype = jnp.float32 if "float32 weight" in name else jnp.bfloat16
    arrays = [jax.device_put(x) for x in (hidden.astype(jnp.bfloat16), weight.astype(dtype), labels)]
    del hidden, weight, labels
    forward = jax.jit(loss).lower(*arrays).compile()
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    results = jax.block_until_ready(both(*arrays))
    held = sum(x.nbytes for x in (*arrays, *jax.tree.leaves(results)))
    extra = getattr(both.memory_analysis(), "temp_size_in_bytes", 0)
    value = float(results[0]) / token_count(shape)
    del results
    return {
        "device": jax.devices()[0].device_kind,
        "milliseconds": 1e3 * median_seconds(lambda: both(*arrays), jax.block_until_ready, 0.2),
        "forward_milliseconds": 1e3 * median_seconds(lambda: forward(*arrays), jax.block_until_ready, 0.2),
        "peak_memory_bytes": held + extra,
        "extra_bytes": extra,
        "allocator_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "loss": value,
    }


def token_count(shape: tuple[int, ...]) -> int:
    """Number of tokens."""
    return shape[0] * shape[1]


def time_variant(name: str, shape: tuple[int, ...]) -> dict:
    """The row of the sum form with a variant's values."""
    from pallas_kernels.cross_entropy import xla

    for key, value in VARIANTS[name].items():
        setattr(xla, key, value)
    return time_jax("jaxstack sum", shape)


def measure_errors(name: str, shape: tuple[int, ...]) -> dict:
    """Errors of loss and gradients against float32, as multiples of those of bfloat16 logits in XLA."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import linear_cross_entropy_sum
    from pallas_kernels.cross_entropy import xla

    xla.CHUNK_BYTES = 2**25
    losses = jax_losses()

    def results(loss: Callable, dtype: Any) -> list[np.ndarray]:
        hidden, weight, labels = make_arrays(shape)
        rounded = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in (hidden, weight)]
        value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*rounded, labels)
        return [np.asarray(x, np.float64) for x in (value, *gradients)]

    def errors(found: list[np.ndarray]) -> list[float]:
        return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(found, exact, strict=True)]

    exact = results(lambda *arrays: linear_cross_entropy_sum(*arrays, implementation="reference"), jnp.float32)
    plain = errors(results(losses["logits + cross-entropy in XLA"], jnp.bfloat16))
    ours = {}
    for title, limit in (("float32 sum", 2**40), ("bfloat16 sum", 0)):
        xla.ACCUMULATOR_BYTES = limit
        ours[title] = errors(results(losses[name], jnp.bfloat16))
    names = ("loss", "d_hidden", "d_weight")
    ratios = {t: dict(zip(names, np.divide(e, np.maximum(plain, 1e-6)), strict=True)) for t, e in ours.items()}
    return {"plain": dict(zip(names, plain, strict=True)), "of plain": ratios}


# --- torch, in a process of its own -------------------------------------------------------------------------------


def time_torch(name: str, shape: tuple[int, ...]) -> dict:
    """F.linear and F.cross_entropy of float32 logits, as a compiled PyTorch model has them."""
    import torch
    import torch.nn.functional as F

    hidden, weight, labels = make_arrays(shape)
    x = torch.from_numpy(hidden.reshape(-1, shape[2])).to("cuda", torch.bfloat16).requires_grad_()
    w = torch.from_numpy(np.ascontiguousarray(weight.T)).to("cuda", torch.bfloat16).requires_grad_()
    y = torch.from_numpy(labels.reshape(-1)).to("cuda", torch.long)

    def loss(x: Any, w: Any) -> Any:
        return F.cross_entropy(F.linear(x, w).float(), y, reduction="sum")

    loss = torch.compile(loss) if "compile" in name else loss

    def both() -> Any:
        total = loss(x, w)
        return total, torch.autograd.grad(total, (x, w))

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    both()
    torch.cuda.reset_peak_memory_stats()
    total = float(both()[0])
    peak = torch.cuda.max_memory_allocated()
    held = 2 * 2 * (x.numel() + w.numel()) + 8 * y.numel()
    return {
        "implementation": f"{name} {torch.__version__}",
        "device": torch.cuda.get_device_name(0),
        "milliseconds": 1e3 * median_seconds(both, wait, 0.2),
        "peak_memory_bytes": peak,
        "extra_bytes": peak - held,
        "loss": total / token_count(shape),
    }


# --- rows ---------------------------------------------------------------------------------------------------------

JAX_NAMES = (
    "jaxstack sum",
    "jaxstack sum, float32 weight",
    "jaxstack per token",
    "logits + cross-entropy in XLA",
)
TORCH_NAMES = ("torch", "torch.compile")
WORKERS = {"jax": time_jax, "variant": time_variant, "torch": time_torch, "errors": measure_errors}


def run_worker(kind: str, name: str, shape: tuple[int, ...], timeout: float) -> dict | None:
    """Run a measurement in a process of its own; print the reason and return None if it fails."""
    command = [sys.executable, __file__, "--worker", json.dumps([kind, name, shape])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: no result within {timeout:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-800:]}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def collect_rows(work: str, shape: tuple[int, ...], args: argparse.Namespace) -> list[dict]:
    """The rows of one work, implementations in turn."""
    if args.variants:
        todo = [("variant", name) for name in VARIANTS]
    else:
        todo = [("jax", name) for name in JAX_NAMES]
        todo += [("torch", name) for name in TORCH_NAMES if importlib.util.find_spec("torch")]
    rows = []
    for kind, name in todo:
        if args.only not in name:
            continue
        found = run_worker(kind, name, shape, args.timeout)
        if found is not None:
            tflops = 6 * math.prod(shape) / found["milliseconds"] / 1e9
            implementation = f"jaxstack sum, {name}" if kind == "variant" else name
            rows.append(
                {"work": work, "implementation": implementation, "devices": 1, "tflops_per_device": tflops, **found}
            )
            print(f"{work}, {implementation}: {found['milliseconds']:.1f} ms, {tflops:.0f} TFLOP/s", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="implementations whose name contains it")
    parser.add_argument("--variants", action="store_true", help="time the sum form with other values of its constants")
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    parser.add_argument("--timeout", type=float, default=90, help="seconds a measurement may take")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, name, shape = json.loads(args.worker)
        print(json.dumps(WORKERS[kind](name, tuple(shape))))
        return 0
    from benchmarks.rows import append_rows, print_table

    failed = False
    if not args.skip_checks and not args.variants:
        found = run_worker("errors", "jaxstack sum", SMALL, args.timeout)
        ratios = found["of plain"] if found else {}
        print("errors against float32 as multiples of plain bfloat16's:", json.dumps(ratios), flush=True)
        failed = not found or max(ratio for of in ratios.values() for ratio in of.values()) > 2
    rows = [row for work, shape in WORKS.items() for row in collect_rows(work, shape, args)]
    append_rows("linear_cross_entropy", rows)
    columns = ["work", "implementation", "milliseconds", "forward_milliseconds", "tflops_per_device"]
    print_table(rows, [*columns, "peak_memory_bytes", "extra_bytes", "loss"])
    print("failed checks:", "errors" if failed else "none")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
