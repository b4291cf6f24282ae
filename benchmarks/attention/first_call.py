"""CPU time of the first call of attention with a new shape, by part: tracing, MLIR, layouts, XLA, ptxas.

    python benchmarks/attention/first_call.py
    python benchmarks/attention/first_call.py "2 x 8192, heads 16/16 x 64" --starts 5
    python benchmarks/attention/first_call.py --label "one loop for all tiles"        # added to the name of the variant
    python benchmarks/attention/first_call.py --tiny        # a short sequence, one start; rows go to tiny/

Needs no GPU: without one, the programs are compiled for an H200 ahead of time, and `device` ends in "absent". Every
start is a process of its own that has imported everything before it begins to count. Of several starts the one with the
least CPU time is kept, as other work on the machine only adds time. `tracing` and `MLIR` (the lowering) are jax's, in
Python; `layouts` is the part of the lowering that chooses the register layouts of Mosaic kernels; `XLA` is what the
process itself spends in the compiler, `ptxas` what the assembler does in processes of its own. Rows with `second
start`, measured only on a GPU, use jax's cache of compiled programs, which the start before filled. Rows are appended
to benchmarks/results/first_call.jsonl.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit

WORKS = ("2 x 5000, heads 32/8 x 128",)
TINY = ("1 x 256, heads 2/1 x 64",)
_WORK = re.compile(r"(\d+) x (\d+), heads (\d+)/(\d+) x (\d+)")
PASSES = ("forward", "forward and backward")
TOTAL = "first_call_cpu_seconds"
PARTS = ("tracing", "MLIR", "layouts", "XLA", "ptxas")
COLUMNS = ("work", "variant", "device", TOTAL, *PARTS, "wall_seconds")


class Clock:
    """CPU seconds of this process and of its children, and wall-clock seconds, since it was made or last read."""

    def __init__(self):
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own, children = (each.ru_utime + each.ru_stime for each in used)
        return own, children, time.time()

    def read(self) -> tuple[float, float, float]:
        """Return (this process's CPU, its children's CPU, wall clock), in seconds."""
        now = self._now()
        passed = tuple(new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return passed[0], passed[1], passed[2]


def time_layout_inference() -> list[float]:
    """Let jax's inference of register layouts append the CPU seconds for each kernel to a list; return that list."""
    from jax.experimental.mosaic.gpu import layout_inference

    seconds: list[float] = []
    infer = layout_inference.infer_layout

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        result = infer(*arguments, **options)
        seconds.append(time.process_time() - began)
        return result

    layout_inference.infer_layout = timed
    return seconds


def first_call(work: str, backward: bool) -> dict[str, Any]:
    """Trace, lower and compile causal attention in bfloat16; return a row's seconds."""
    import jax
    import jax.numpy as jnp

    from jaxstack.plan.rehearsal import gpu_topology
    from pallas_kernels import flash_attention, lowering_platform

    batch, length, heads, kv_heads, head_dim = parse(work)
    absent = jax.default_backend() != "gpu"
    device = gpu_topology(1).devices[0] if absent else jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16, sharding=sharding)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return flash_attention(q, k, v, implementation="mosaic")

    def attend_and_differentiate(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(d_out)

    q = array(heads)
    k = array(kv_heads)
    function, arguments = (attend_and_differentiate, (q, k, k, q)) if backward else (attend, (q, k, k))
    layouts = time_layout_inference()
    with lowering_platform("cuda"):
        small = jax.ShapeDtypeStruct((1, 128, 1, head_dim), jnp.bfloat16)
        jax.eval_shape(attend_and_differentiate, *[small] * 4)  # imports what is imported at the first use
        clock = Clock()
        traced = jax.jit(function).trace(*arguments)
        tracing = clock.read()
        lowered = traced.lower()
        lowering = clock.read()
        lowered.compile()
        compilation = clock.read()
    parts = (tracing[0], lowering[0] - sum(layouts), sum(layouts), compilation[0], compilation[1])
    return {
        "device": f"{device.device_kind}, absent" if absent else device.device_kind,
        TOTAL: sum(parts),
        **dict(zip(PARTS, parts, strict=True)),
        "wall_seconds": tracing[2] + lowering[2] + compilation[2],
    }


def parse(work: str) -> tuple[int, ...]:
    """Return batch, length, heads, heads of keys and head dim of a work.

    Raises:
        SystemExit: The text is not of the form of `WORKS`.
    """
    found = _WORK.fullmatch(work)
    if found is None:
        raise SystemExit(f"a work is written like {WORKS[0]!r}; found {work!r}")
    return tuple(map(int, found.groups()))


def start(work: str, passes: str, cache: str | None, timeout: float) -> dict[str, Any]:
    """Return `first_call` of a process of its own; `cache` is its directory of compiled programs."""
    # A large module is compiled to a cache entry however little time it takes.
    variables = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    variables |= {"JAX_ENABLE_COMPILATION_CACHE": "false"} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache}
    command = [sys.executable, __file__, work, "--start", passes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=variables)
    if done.returncode:
        raise SystemExit(f"the start failed: {done.stderr[-2000:].strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(work: str, label: str, starts: int, timeout: float) -> list[dict[str, Any]]:
    """Return the rows of a work."""
    rows = []
    for passes in PASSES:
        found = min((start(work, passes, None, timeout) for _ in range(starts)), key=itemgetter(TOTAL))
        variant = ", ".join(filter(None, (passes, label)))
        rows.append({"work": work, "implementation": "jaxstack", "variant": variant, **found, "starts": starts})
        if "absent" not in found["device"]:
            with tempfile.TemporaryDirectory() as cache:
                _, second = (start(work, passes, cache, timeout) for _ in range(2))
            rows.append({**rows[-1], "variant": f"{variant}, second start", **second, "starts": 1})
    return rows


def main() -> None:
    """Measure each work, keep its rows, and print what share each part has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help=f"shapes, written like the default: {', '.join(WORKS)}")
    parser.add_argument("--starts", type=positive(int), default=3, help="processes per row, of which the best counts")
    parser.add_argument("--label", default="", help="text added to the variant of the rows")
    parser.add_argument("--tiny", action="store_true", help="a short sequence, one start; rows go to tiny/")
    parser.add_argument("--timeout", type=positive(float), default=300, help="seconds a start may take")
    parser.add_argument("--start", choices=PASSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    works = args.works or (TINY if args.tiny else WORKS)
    for work in works:
        parse(work)
    if args.start is not None:
        print(json.dumps(first_call(works[0], args.start != PASSES[0])))
        return
    script = "tiny/first_call" if args.tiny else "first_call"
    require_commit(script)
    for work in works:
        rows = measure(work, args.label, 1 if args.tiny else args.starts, args.timeout)
        append_rows(script, rows)
        print_table(rows, COLUMNS)
        for row in rows:
            shares = ", ".join(f"{part} {row[part] / row[TOTAL]:.0%}" for part in PARTS)
            print(f"{row['variant']}: {shares}", flush=True)


if __name__ == "__main__":
    main()
