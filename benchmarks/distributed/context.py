"""Attention over a sequence on all GPUs of this machine: ring, all-gather and all-to-all, compared with one device.

    python benchmarks/distributed/context.py                              # errors, then all rows
    python benchmarks/distributed/context.py --tokens 16384 --only ring   # one length a device, one method
    python benchmarks/distributed/context.py --window 4096                # sliding window

One sequence, causal, bfloat16, in zig-zag order. `efficiency` is the time of the whole sequence on one GPU, by the
kernel that this repository chooses, divided by the number of GPUs and by the time measured: 1 would be perfect. Rows
are appended to benchmarks/results/context.jsonl.
"""

import argparse
import functools
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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from pallas_kernels import context_attention, flash_attention, record_choices, sequence_order

METHODS = ("ring", "all_gather", "all_to_all", "auto")
TOKENS = (16384, 8192, 4096, 2048)
HEADS = ((32, 8, 128), (16, 16, 64))
"""Query heads, key heads, head dim."""
START = time.monotonic()

Attention = Callable[..., Any]


def make_mesh() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("context",), axis_types=(AxisType.Auto,))


def over_devices(mesh: Mesh, method: str, **options: Any) -> Attention:
    """Attention to q, k, v in zig-zag order, by this method."""
    part = P(None, "context")
    attend = functools.partial(
        context_attention, axis_name="context", method=None if method == "auto" else method, **options
    )
    return jax.shard_map(
        lambda q, k, v: attend(q, k, v), mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=False
    )


def arrays(length: int, heads: tuple[int, int, int], place: Any) -> list[jax.Array]:
    """q, k, v and the cotangent of out, [1, length, ...]."""
    n, k, width = heads
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.jit(lambda key, m=m: jax.random.normal(key, (1, length, m, width), jnp.bfloat16), out_shardings=place)(key)
        for key, m in zip(keys, (n, k, k, n), strict=True)
    ]


def forward_and_backward(attention: Attention) -> Attention:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out)

    return run


def errors(mesh: Mesh, method: str, window: int | None) -> str:
    """The largest relative error of out and gradients, against the reference in float32 on one device."""
    length = 256 * jax.device_count()
    x = arrays(length, (8, 8, 64), jax.devices()[0])
    exact = forward_and_backward(functools.partial(flash_attention, window=window, implementation="reference"))
    truth = jax.tree.leaves(jax.jit(exact)(*(a.astype(jnp.float32) for a in x)))
    order = sequence_order(length, jax.device_count())
    place = NamedSharding(mesh, P(None, "context"))
    ordered = [jax.device_put(a[:, order], place) for a in x]
    found = jax.tree.leaves(jax.jit(forward_and_backward(over_devices(mesh, method, window=window)))(*ordered))
    found = [np.asarray(a, np.float32)[:, np.argsort(order)] for a in found]
    off = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, map(np.asarray, truth), strict=True)]
    words = " ".join(f"{part} {error:.1e}" for part, error in zip(("out", "d_q", "d_k", "d_v"), off, strict=True))
    return f"{'ok  ' if max(off) < 0.02 else 'FAIL'} {method}: relative error {words}"


def measure(
    mesh: Mesh, tokens: int, heads: tuple[int, int, int], methods: list[str], window: int | None
) -> list[dict[str, Any]]:
    """Rows of every method with so many tokens a device, after those of one device with all of them."""
    count = jax.device_count()
    length = tokens * count
    near = min(window or length, length)
    pairs = near * length - near * (near - 1) / 2 if window else length * length / 2
    flops = 4.0 * pairs * heads[0] * heads[2]
    spread = NamedSharding(mesh, P(None, "context"))
    works: dict[str, tuple[Attention, Any, int]] = {
        "one device": (functools.partial(flash_attention, window=window), jax.devices()[0], 1)
    }
    works |= {name: (over_devices(mesh, name, window=window), spread, count) for name in methods}

    def prepare(work: tuple[Attention, Any, int]) -> tuple[list[Any], list[str]]:
        attention, place, _ = work
        n, k, width = heads
        shapes = [jax.ShapeDtypeStruct((1, length, m, width), jnp.bfloat16, sharding=_on(place)) for m in (n, k, k, n)]
        with record_choices() as choices:
            lowered = [jax.jit(attention).lower(*shapes[:3]), jax.jit(forward_and_backward(attention)).lower(*shapes)]
        return [program.compile() for program in lowered], list(dict.fromkeys(choice.backend for choice in choices))

    with ThreadPoolExecutor(8) as pool:
        ready = dict(zip(works, pool.map(prepare, works.values()), strict=True))
    rows = []
    alone = {}
    for name, (programs, backends) in ready.items():
        _, place, devices = works[name]
        x = arrays(length, heads, place)
        for part, program, inputs, passes in zip(
            ("forward", "forward+backward"), programs, (x[:3], x), (1.0, 3.5), strict=True
        ):
            taken = median_seconds(lambda p=program, i=inputs: p(*i), jax.block_until_ready)
            alone.setdefault(part, taken)
            memory = program.memory_analysis()
            row = {"work": _describe(part, count, tokens, heads, window), "implementation": f"jaxstack {name}"}
            row |= {"backend": "+".join(backends), "milliseconds": 1e3 * taken}
            row |= {"tflops_per_device": passes * flops / devices / taken / 1e12}
            row |= {"efficiency": alone[part] / devices / taken}
            row |= {"temporary_bytes": memory.temp_size_in_bytes if memory else None}
            row |= {"device": jax.devices()[0].device_kind, "devices": devices}
            rows.append(row)
        del x
    return rows


def _on(place: Any) -> Any:
    return place if isinstance(place, NamedSharding) else jax.sharding.SingleDeviceSharding(place)


def _describe(part: str, count: int, tokens: int, heads: tuple[int, int, int], window: int | None) -> str:
    seen = f"window {window}" if window else "causal"
    return f"context attention {part} {count} x {tokens}, {heads[0]}/{heads[1]}, {heads[2]} {seen} bf16"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="tokens a device")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--window", type=int, help="keys that a query sees; left out: all before it")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no further shape after so long")
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print("needs two or more NVIDIA GPUs and jax[cuda13]", file=sys.stderr)
        return 2
    mesh = make_mesh()
    chosen = [name for name in arguments.only if name != "all_to_all" or 8 % jax.device_count() == 0]
    if not arguments.skip_checks:
        for name in chosen:
            print(errors(mesh, name, arguments.window), flush=True)
    for heads in HEADS:
        for tokens in arguments.tokens:
            if time.monotonic() - START > arguments.seconds:
                print(f"(out of time at {heads}, {tokens})")
                return 1
            rows = measure(mesh, tokens, heads, chosen, arguments.window)
            columns = ("work", "implementation", "backend", "milliseconds", "tflops_per_device", "efficiency")
            print_table(rows, columns)
            append_rows("context", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
