"""The matrix products alone of the step that cpu_nanogpt.py measures, by XLA and by PyTorch in turn.

    python benchmarks/cpu_matmuls.py --rounds 5
    python benchmarks/cpu_matmuls.py --cores 2 --xla xla_cpu_use_onednn=true

Every product of the step, forward and backward, in float32: each is timed by itself, and the times are added up. They
bound a step from below, as a step computes nothing without them. The time of a product is that of its fastest call, and
a process keeps to one core (`--cores`), so that other programs on the machine hardly matter: calls are shorter than a
scheduler's time slice. Each implementation has a process of its own in every round; the table gives the median over
rounds. `--xla` adds rows of XLA with compiler options.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.arguments import positive
from benchmarks.cpu_nanogpt import BATCH, LENGTH, VOCABULARY
from benchmarks.rows import append_rows, print_table, require_commit

LAYERS = 4
HEADS = 4
WIDTH = 128
TOKENS = BATCH * LENGTH
DENSE = {(WIDTH, 3 * WIDTH): LAYERS, (WIDTH, WIDTH): LAYERS, (WIDTH, 4 * WIDTH): LAYERS, (4 * WIDTH, WIDTH): LAYERS,
         (WIDTH, VOCABULARY): 1}  # fmt: skip
"""(inputs, outputs) of a weight -> how many the model has."""
COLUMNS = ("work", "implementation", "milliseconds", "tflops_per_device")
Product = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Einsum, shapes of its operands, how often a step computes it."""


def products() -> list[Product]:
    """Return every product of a step: of each weight and of attention, forward and both gradients."""
    found: list[Product] = []
    for (inputs, outputs), count in DENSE.items():
        x = (TOKENS, inputs)
        w = (inputs, outputs)
        y = (TOKENS, outputs)
        found += [("mk,kn->mn", x, w, count), ("mn,kn->mk", y, w, count), ("mk,mn->kn", x, y, count)]
    rows = (BATCH * HEADS, LENGTH, WIDTH // HEADS)
    square = (BATCH * HEADS, LENGTH, LENGTH)
    # Scores and the gradient of the weights; outputs and the gradient of the queries; the gradients of keys and values.
    found += [("bth,bsh->bts", rows, rows, 2 * LAYERS), ("bts,bsh->bth", square, rows, 2 * LAYERS)]
    return [*found, ("bts,bth->bsh", square, rows, 2 * LAYERS)]


def flops(product: Product) -> float:
    """Return the FLOPs of one computation of the product."""
    subscripts, left, right, _ = product
    sizes = dict(zip(subscripts.replace(",", "").split("->")[0], (*left, *right), strict=True))
    return 2.0 * float(np.prod(list(sizes.values())))


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest call, of at least 30 and for at least a fifth of a second."""
    for _ in range(5):
        call()
    taken: list[float] = []
    while len(taken) < 30 or sum(taken) < 0.2:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure_xla(options: dict[str, str]) -> float:
    """Return the seconds of all products by XLA."""
    import jax
    import jax.numpy as jnp

    total = 0.0
    for subscripts, left, right, count in products():
        a, b = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in (left, right))
        lowered = jax.jit(lambda a, b, s=subscripts: jnp.einsum(s, a, b)).lower(a, b)
        program = lowered.compile(compiler_options=options or None)
        total += count * seconds_of(lambda p=program, a=a, b=b: p(a, b).block_until_ready())
    return total


def measure_torch() -> float:
    """Return the seconds of all products by PyTorch."""
    import torch

    total = 0.0
    for subscripts, left, right, count in products():
        a, b = (torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype("f4")) for shape in (left, right))
        plain = {"mk,kn->mn": lambda a, b: a @ b, "mn,kn->mk": lambda a, b: a @ b.T, "mk,mn->kn": lambda a, b: a.T @ b,
                 "bth,bsh->bts": lambda a, b: a @ b.mT, "bts,bsh->bth": lambda a, b: a @ b,
                 "bts,bth->bsh": lambda a, b: a.mT @ b}[subscripts]  # fmt: skip
        total += count * seconds_of(lambda f=plain, a=a, b=b: f(a, b))
    return total


def run_worker(name: str, options: list[str], cores: int) -> float:
    """Return the milliseconds that a process of its own measures."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, __file__, "--worker", name, f"--cores={cores}", "--xla", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(options)} failed:\n{done.stderr[-1500:]}")
    return 1e3 * json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the products by each library in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive(int), default=5, help="how often each implementation takes its turn")
    parser.add_argument("--cores", type=positive(int), default=1, help="cores that a process may use")
    parser.add_argument("--xla", nargs="*", default=[], metavar="option=value", help="compiler options of XLA")
    parser.add_argument("--worker", choices=("XLA", "PyTorch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.xla)
    if args.worker:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
        print(json.dumps(measure_xla(options) if args.worker == "XLA" else measure_torch()))
        return
    require_commit("cpu_matmuls")
    turns: list[tuple[str, list[str]]] = [("XLA", [])]
    turns += [("PyTorch", [])] if importlib.util.find_spec("torch") else []
    turns += [("XLA", args.xla)] if args.xla else []
    found = [[run_worker(*turn, args.cores) for turn in turns] for _ in range(args.rounds)]
    work = sum(flops(product) * product[3] for product in products())
    rows = []
    for (name, extra), taken in zip(turns, zip(*found, strict=True), strict=True):
        milliseconds = median(taken)
        rows.append({
            "work": f"nanogpt cpu float32, products alone, cores: {args.cores}",
            "implementation": " ".join([name, *extra]), "device": "cpu", "devices": 1, "cores": args.cores,
            "milliseconds": milliseconds,
            "fastest_milliseconds": min(taken), "tflops_per_device": work / milliseconds / 1e9,
            "rounds": args.rounds,
        })  # fmt: skip
    append_rows("cpu_matmuls", rows)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
